"""A transformers model as receiver: bit-identical weights, and logits that prove they are the live ones."""

import pytest
import torch

from megatron import weight_sync as ws

transformers = pytest.importorskip("transformers")


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def models(request):
    config = transformers.Qwen3Config(
        vocab_size=37,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        tie_word_embeddings=request.param,
    )
    out = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        out.append(transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).eval())
    return out


def test_transformers_model_follows(models):
    policy, rollout = models
    sender, receiver = ws.Sender("qwen3-tiny"), ws.ModuleReceiver(rollout)
    sender.register("rollout")
    names = dict(policy.named_parameters())
    assert ("lm_head.weight" in names) != policy.config.tie_word_embeddings
    tokens = torch.randint(0, 37, (2, 9), generator=torch.Generator().manual_seed(3))
    old = {name: torch.empty(0) for name in names}
    for step in range(6):
        update = sender.begin()
        assert update.dense == (step == 0)
        for name, tensor in names.items():
            if update.dense:
                update.add_dense(name, tensor)
                continue
            changed = ws.fingerprints.bits_of(tensor) != ws.fingerprints.bits_of(old[name])
            index = changed.view(-1).nonzero().view(-1)
            update.add_delta(name, index, tensor.detach().view(-1)[index], tensor.shape, full=tensor)
        ack = receiver.apply(update.finish(ws.fingerprint(names)))
        assert sender.acknowledge("rollout", ack)
        assert all(torch.equal(t, rollout.state_dict()[n]) for n, t in policy.state_dict().items())
        with torch.no_grad():
            assert torch.equal(policy(tokens).logits, rollout(tokens).logits)
            old = {name: tensor.detach().clone() for name, tensor in names.items()}
            for tensor in names.values():
                tensor.add_((torch.rand_like(tensor) < 0.05) * torch.randn_like(tensor) * 0.1)
