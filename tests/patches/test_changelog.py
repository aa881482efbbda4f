"""CHANGELOG.md: the form that `patchset check` asks for."""

import pytest

from patchset import ROOT, PatchsetError, changelog

GOOD = """# Changelog

All changes.

## [Unreleased]

### Added

- A thing,
  over two lines.

## [0.2.0+ours.3]

### Changed

- Another thing.

### Fixed

- A bug.

## [0.1.0+ours.1]

### Added

- The first thing.
"""
CURRENT = "0.2.0+ours.3"


def test_changelog_of_this_repository_is_in_form():
    assert changelog.check(ROOT) == []


def test_good_form():
    assert list(changelog.faults(GOOD, CURRENT)) == []
    assert list(changelog.faults(GOOD, "0.2.0+ours.4")) == []
    assert list(changelog.faults("# Changelog\n\n## [Unreleased]\n", CURRENT)) == []


@pytest.mark.parametrize(
    "old, new, line, fault",
    [
        ("# Changelog\n", "Changes\n", 1, "expected '# Changelog'"),
        ("All changes.", "- A loose entry.", 3, "stands before any version"),
        ("All changes.", "### Added", 3, "stands before any version"),
        (
            "[0.2.0+ours.3]",
            "[0.2.0+ours.3] - 2026-11-30",
            12,
            "the heading is not [Unreleased] or like [0.2.0+ours.3], without a date (the release's tag has "
            "it): [0.2.0+ours.3] - 2026-11-30",
        ),
        ("[0.2.0+ours.3]", "[0.2.0+ours.4]", 12, "[0.2.0+ours.4] does not count down from 0.2.0+ours.3"),
        ("[0.2.0+ours.3]", "[0.3.0+ours.3]", 12, "[0.3.0+ours.3] does not count down from 0.2.0+ours.3"),
        ("[0.1.0+ours.1]", "[0.1.0+ours.3]", 22, "[0.1.0+ours.3] does not count down from 0.2.0+ours.3"),
        ("[0.1.0+ours.1]", "[Unreleased]", 22, "[Unreleased] comes first, and once"),
        (
            "### Fixed",
            "### Mended",
            18,
            "'Mended' is not one of Added, Changed, Deprecated, Removed, Fixed, Security",
        ),
        ("### Fixed", "### Changed", 18, "a second 'Changed' in one section"),
        ("- A bug.\n", "Something.\n", 18, "'Fixed' has no entry"),
        ("### Changed\n", "", 15, "an entry stands under no '### Added', '### Changed', …"),
        ("### Added\n\n- The first thing.\n", "", 22, "[0.1.0+ours.1] has no entry"),
    ],
)
def test_faults(old, new, line, fault):
    assert GOOD.count(old) >= 1
    assert list(changelog.faults(GOOD.replace(old, new, 1), CURRENT)) == [(line, fault)]


def test_no_section_for_what_is_being_worked_on():
    text = GOOD.replace("## [Unreleased]\n\n### Added\n\n- A thing,\n  over two lines.\n\n", "")
    assert list(changelog.faults(text, CURRENT)) == []
    assert list(changelog.faults(text, "0.2.0+ours.4")) == [
        (1, "neither [Unreleased] nor [0.2.0+ours.4] is there")
    ]


def test_missing_file_and_place_of_a_fault(mini):
    assert changelog.check(mini.root) == ["CHANGELOG.md is missing"]
    mini.write("CHANGELOG.md", "# Changelog\n\n## [Unreleased]\n\n### Added\n")
    assert changelog.check(mini.root) == ["CHANGELOG.md:5: 'Added' has no entry"]


def test_notes_and_counter():
    assert changelog.notes(GOOD, CURRENT) == "### Changed\n\n- Another thing.\n\n### Fixed\n\n- A bug."
    assert changelog.notes(GOOD, "0.2.0+ours.2") is None
    assert [changelog.counter(v) for v in ("0.2.0+ours.3", "1+a.b.12", "1+7")] == [3, 12, 7]
    with pytest.raises(
        PatchsetError, match=r"'0\.2\.0' is not a version of the form <upstream>\+<label>\.<k>"
    ):
        changelog.counter("0.2.0")


def test_patchset_check_reads_the_changelog(mini, monkeypatch):
    """The command, and not only the function."""
    from patchset import __main__ as command

    monkeypatch.setattr(command, "ROOT", mini.root)
    mini.patch("core-first: change line 7", "megatron/core/numbers.py", "line_7 = 7", "line_7 = 70")
    mini.write("CHANGELOG.md", "# Changelog\n\n## [Unreleased]\n\n### Added\n")
    with pytest.raises(SystemExit, match=r"patchset: CHANGELOG\.md:5: 'Added' has no entry"):
        command.main(["check"])
    mini.write("CHANGELOG.md", "# Changelog\n\n## [Unreleased]\n")
    command.main(["check"])
