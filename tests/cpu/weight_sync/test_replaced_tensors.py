"""A module whose live tensors are replaced behind the receiver's back: noticed, and found anew or refused."""

import pytest
import torch

from megatron import weight_sync as ws
from tests.cpu.weight_sync.trainer import Trainer, same


def new_data(module):
    module.proj.weight.data = module.proj.weight.data.clone()


def there_and_back(module):
    module.to(torch.float64).to(torch.bfloat16)
    module.bias_correction.data = module.bias_correction.float()


def new_parameter(module):
    module.proj.weight = torch.nn.Parameter(module.proj.weight.detach().clone())


def assigned(module):
    module.load_state_dict({n: t.clone() for n, t in module.state_dict().items()}, assign=True)
    module.head.weight = module.embed.weight


def new_buffer(module):
    module.bias_correction = module.bias_correction.clone()


REPLACED = [new_data, there_and_back, new_parameter, assigned, new_buffer]


@pytest.mark.parametrize("on_failure", ["raise", "resync"])
@pytest.mark.parametrize("replace", REPLACED, ids=lambda f: f.__name__)
def test_replaced_tensors_are_noticed_and_found_anew(pair, replace, on_failure):
    trainer, module, receiver = pair()
    gen, transport = torch.Generator().manual_seed(2), ws.LocalTransport({"r": receiver})

    def sync():
        def fill(update):
            for name, tensor in trainer.tensors.items():
                index = trainer.bits[name].nonzero().view(-1)
                if update.dense:
                    update.add_dense(name, tensor)
                else:
                    update.add_delta(name, index, tensor.view(-1)[index], tuple(tensor.shape))
            return ws.fingerprint(trainer.tensors)

        return ws.synchronise(trainer.sender, transport, fill, on_failure=on_failure)

    replace(module)
    trainer.step(0.3, gen)
    held = [t.clone() for t in module.state_dict().values()]
    if on_failure == "raise":
        text = r"r: ReceiverPoisoned: .* no known version \(\d+ tensors were replaced by others .*\): .*dense"
        with pytest.raises(ws.SyncFailed, match=text):
            sync()
        assert all(torch.equal(a, b) for a, b in zip(held, module.state_dict().values(), strict=True))
        assert trainer.sender.state("r") == "poisoned" and receiver.status().poisoned
        assert sync().dense_bytes > 0
    else:
        assert sync().healed == ["r"]
    assert same(trainer, module) and trainer.sender.state("r") == "synced"
    trainer.step(0.3, gen)
    assert sync().dense_bytes == 0 and same(trainer, module)
    ours = ws.fingerprint(trainer.tensors)
    assert receiver.live_fingerprint(ours) == ours


@pytest.mark.parametrize("replace", REPLACED, ids=lambda f: f.__name__)
def test_replaced_tensors_are_seen_by_status(pair, replace):
    trainer, module, receiver = pair()
    replace(module)
    assert not trainer.acknowledge("r", receiver.status())
    assert trainer.sender.state("r") == "poisoned"
    receiver.apply(trainer.publish())
    assert same(trainer, module) and receiver.status().version == 2


def test_tensors_replaced_before_the_first_sync(tiny, tensors_of):
    trainer, module = Trainer(tensors_of(tiny(1))), tiny(2)
    receiver = ws.ModuleReceiver(module)
    there_and_back(module)
    trainer.sender.register("r")
    assert trainer.acknowledge("r", receiver.apply(trainer.publish()))
    assert same(trainer, module)


@pytest.mark.parametrize("dense", [True, False])
def test_tensors_replaced_while_a_payload_is_applied(pair, dense):
    trainer, module, receiver = pair()
    trainer.step(0.3, torch.Generator().manual_seed(2))
    receiver._after_writing = lambda: new_data(module)
    with pytest.raises(
        ws.ReceiverPoisoned, match=r"1 tensors .*replaced.*'proj.weight'.* while version 2 was applied"
    ):
        receiver.apply(trainer.publish(dense))
    del receiver._after_writing
    assert receiver.status().poisoned
    assert trainer.acknowledge("r", receiver.apply(trainer.publish(True, again=True)))
    assert same(trainer, module)


def test_a_replaced_tensor_that_does_not_fit_is_named(pair):
    trainer, module, receiver = pair()
    sums, trained = receiver.live_fingerprint(), {n: t.clone() for n, t in trainer.tensors.items()}
    trainer.step(0.3, torch.Generator().manual_seed(2))
    payload = trainer.publish(dense=True)

    def refused(kind, text):
        with pytest.raises(kind, match=text):
            receiver.apply(payload)
        assert receiver.status().poisoned and torch.equal(module.embed.weight, trained["embed.weight"])

    module.proj.float()
    refused(
        ws.LayoutMismatch,
        r"^proj\.(weight|bias): payload has torch.bfloat16 .*, receiver has torch.float32",
    )
    moved = {n for n, value in receiver.live_fingerprint().items() if value != sums[n]}
    assert moved == {"proj.weight", "proj.bias"}
    module.proj.to("meta")
    refused(ws.UnsupportedLayout, r"^proj\.weight: .* on meta cannot be updated")
    module.proj.to_empty(device="cpu").bfloat16()
    module.head.weight = torch.nn.Parameter(module.head.weight.detach().clone())
    refused(ws.MissingTensor, r"1 are missing.*head\.weight")
    module.head.weight = module.embed.weight
    receiver.apply(payload)
    assert same(trainer, module) and receiver.status().version == 2


def test_tensors_that_no_update_reaches_are_refused(tiny):
    module = tiny(1)
    module.proj.bias.untyped_storage().resize_(0)
    with pytest.raises(ws.UnsupportedLayout, match=r"^proj\.bias: its storage is freed"):
        ws.ModuleReceiver(module)
    module = tiny(1)
    module.proj.register_state_dict_post_hook(
        lambda _, state, prefix, __: state.update({prefix + "bias": state[prefix + "bias"].clone()})
    )
    with pytest.raises(ws.UnsupportedLayout, match=r"^proj\.bias: state_dict\(\) makes a copy of it"):
        ws.ModuleReceiver(module)
