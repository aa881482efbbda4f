"""The convention of patches/README.md, on the real queue and on broken ones."""

import pytest

from patchset import ROOT, queue, replay

NUMBERS = "megatron/core/numbers.py"


def test_the_queue_of_this_repository_is_in_order(sdist, monkeypatch):
    monkeypatch.setenv("MEGATRON_CORE_SDIST", str(sdist))
    assert replay.check(ROOT) == []


def test_first_patches_are_there():
    assert queue.names(ROOT / "patches")[:2] == ["build-metadata.patch", "package-info-no-git.patch"]


def test_series_and_folder_differ(mini):
    path = mini.patch("core-first: change line 7", NUMBERS, "line_7 = 7", "line_7 = 70")
    path.with_name("core-lost.patch").write_bytes(path.read_bytes())
    (mini.root / "patches/series").write_text(
        "# a comment\ncore-first.patch\ncore-gone.patch\ncore-first.patch\n"
    )
    assert replay.check(mini.root)[:3] == [
        "core-first.patch: listed twice in the series",
        "core-gone.patch: in the series, but there is no such file",
        "core-lost.patch: not in the series",
    ]


def test_order_matters_on_one_file(mini):
    first = mini.patch("core-first: change line 7", NUMBERS, "line_7 = 7", "line_7 = 70")
    second = mini.patch("core-second: change line 30", NUMBERS, "line_30 = 30", "line_30 = 300")
    assert replay.check(mini.root) == []
    (mini.root / "patches/series").write_text("core-second.patch\ncore-first.patch\n")
    (problem,) = replay.check(mini.root)
    for path in (first, second):  # the header's length is the author's name's too
        line = 1 + path.read_text().splitlines().index(f"diff --git a/{NUMBERS} b/{NUMBERS}")
        assert f"{path.name}:{line}: {NUMBERS}: made for another state of this file: " in problem


HEADER = """From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
From: A <a@b.invalid>
Date: Mon, 30 Nov 2026 13:04:32 +0000
Subject: [PATCH] {subject}

{why}

Upstream-Status: {status}
Removal: {removal}
---
"""
GOOD = {
    "subject": "area-topic: what it does, over\n more than one line",
    "why": "This is why the change is needed: something upstream is wrong,\nand this mends it.",
    "status": "Pending",
    "removal": "when upstream does it",
}


STATUS = "Upstream-Status is not Pending, Submitted [where], Backport [where] or Inappropriate [reason]"


@pytest.mark.parametrize(
    "change, fault",
    [
        ({}, None),
        ({"status": "Submitted [a pull request]"}, None),
        ({"status": "Backport [core_v0.20.0]"}, None),
        ({"status": "Inappropriate [packaging of\nthe fork]"}, None),
        (
            {"subject": "no topic"},
            "the subject is not '[PATCH] area-topic: what it does': '[PATCH] no topic'",
        ),
        ({"subject": "area: x"}, "the subject is not '[PATCH] area-topic: what it does': '[PATCH] area: x'"),
        (
            {"subject": "area-topic:"},
            "the subject is not '[PATCH] area-topic: what it does': '[PATCH] area-topic:'",
        ),
        ({"subject": "area-other: x"}, "its subject asks for the name area-other.patch"),
        ({"why": "short"}, "the header does not say why the change is needed"),
        ({"why": "TODO" * 30}, "the header does not say why the change is needed"),
        ({"removal": ""}, "Removal does not say when the patch can go"),
        ({"removal": "TODO"}, "Removal does not say when the patch can go"),
        *(
            ({"status": status}, STATUS)
            for status in ("", "pending", "Submitted", "Backport []", "Inappropriate")
        ),
    ],
)
def test_header(change, fault):
    header = HEADER.format(**GOOD | change).encode()
    assert list(queue.header_faults(header, "area-topic.patch")) == ([fault] if fault else [])


def test_line_budget(mini):
    block = "".join(f"added_{n} = {n}\n" for n in range(400))
    mini.patch("core-big: add much", NUMBERS, "line_7 = 7\n", "line_7 = 7\n" + block)
    assert replay.check(mini.root) == [
        "the patches add 400 lines; the limit is 399: move logic into megatron/"
    ]


def test_patch_that_adds_a_file(mini):
    path = mini.patch("core-first: change line 7", NUMBERS, "line_7 = 7", "line_7 = 70")
    head = path.read_text().partition("\ndiff --git ")[0]
    path.write_text(
        f"{head}\ndiff --git a/x.py b/x.py\nnew file mode 100644\nindex {'0' * 40}..{queue.blob(b'x\n')}\n"
        "--- /dev/null\n+++ b/x.py\n@@ -0,0 +1 @@\n+x\n"
    )
    (problem,) = replay.check(mini.root)
    assert problem.endswith(
        "x.py: not a change to an existing file with a full index line; new files go under megatron/"
    )
