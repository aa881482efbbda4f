"""`auto`: the encoding that is fastest over the link; given, or learnt from deliveries."""

import logging

import pytest
import torch

from megatron import weight_sync as ws
from megatron.weight_sync import auto, codec

COSTS = {"raw": (1e-9, 6.0), "packed": (3e-9, 3.2), "entropy": (40e-9, 1.3)}


@pytest.fixture
def known(monkeypatch):
    monkeypatch.setattr(auto, "costs", lambda device: COSTS)


@pytest.mark.parametrize(("link", "best"), [(1e6, "entropy"), (1e9, "packed"), (1e12, "raw")])
def test_fastest_over_a_link(known, link, best):
    assert auto.fastest(link) == best


def test_costs_are_measured_here():
    found = auto.costs("cpu")
    assert set(found) == set(codec.ENCODINGS) and all(seconds > 0 for seconds, _ in found.values())
    sizes = {name: size for name, (_, size) in found.items()}
    assert sizes["raw"] == 6.0 and 3.0 < sizes["packed"] < 3.2 and sizes["entropy"] < 1.4
    assert auto.costs("cpu") is found


def test_link_is_learnt_and_the_choice_logged_once(known, caplog):
    chooser = auto.Chooser(None)
    with caplog.at_level(logging.INFO):
        assert chooser.pick("cpu") == ("raw", "packed")
        chooser.observe(100, 1.0)  # too small to say anything
        assert chooser.pick("cpu") == ("raw", "packed")
        chooser.observe(10**6, 1.0)
        assert chooser.pick("cpu") == chooser.pick("cpu") == ("entropy",)
    assert [r.getMessage() for r in caplog.records] == [
        "weight sync encodes raw+packed (link: unknown bytes/s)",
        "weight sync encodes entropy (link: 1000000.0 bytes/s)",
    ]
    given = auto.Chooser(1e12)
    given.observe(10**6, 1.0)
    assert given.pick("cpu") == ("raw",)
    with pytest.raises(ValueError, match="bytes per second"):
        auto.fastest(0)


@pytest.mark.parametrize(
    ("link", "best"), [(1e6, "entropy"), (1e9, "packed"), (1e12, "raw"), (None, "entropy")]
)
def test_a_sender_that_chooses(known, monkeypatch, link, best):
    if link is None:
        monkeypatch.setattr(auto.Chooser, "observe", lambda self, nbytes, seconds: setattr(self, "link", 1e6))
    source, target = torch.nn.Linear(70, 30), torch.nn.Linear(70, 30)
    tensors, old = dict(source.state_dict()), {}
    sender = ws.Sender("m", lineage=1, encodings="auto", link=link)
    sender.register("r")
    transport = ws.LocalTransport({"r": ws.ModuleReceiver(target)})
    seen = []

    def fill(update):
        for name, tensor in tensors.items():
            if update.dense:
                update.add_dense(name, tensor)
            else:
                index = (tensor != old[name]).view(-1).nonzero().view(-1)
                update.add_delta(name, index, tensor.view(-1)[index], tensor.shape)
        seen.append(update._stats["encodings"])
        return ws.fingerprint(tensors)

    for k in range(2):
        if k:
            for name, tensor in tensors.items():
                old[name] = tensor.clone()
                tensor.view(-1)[::9] += 1
        ws.synchronise(sender, transport, fill)
    assert sender.encodings == (best,) and torch.equal(source.weight, target.weight)
