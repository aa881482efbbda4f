"""CHANGELOG.md in the form of Keep a Changelog, with our versions and without dates.

A section is headed `## [Unreleased]` or `## [<upstream>+<label>.<k>]`, newest first. A release's date is its
landing date, which is not known when the section is written; the tag has it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from . import PatchsetError, backend

FILE = "CHANGELOG.md"
UNRELEASED = "Unreleased"
KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
VERSION = re.compile(r"[^\s+\]]+\+(?:[a-z0-9]+\.)*(\d+)")


@dataclass
class Section:
    """What stands under a heading: `## [version]`, or within it `### Kind`."""

    heading: str
    line: int
    parts: list["Section"] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)  # their lines; those before the first part


def counter(version: str) -> int:
    """The k of `<upstream>+<label>.<k>`, which counts releases."""
    found = VERSION.fullmatch(version)
    if not found:
        raise PatchsetError(f"{version!r} is not a version of the form <upstream>+<label>.<k>")
    return int(found[1])


def notes(text: str, version: str) -> str | None:
    """The text under a version's heading; None when it has no section."""
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        if heading.strip() == f"[{version}]":
            return body.strip()
    return None


def parse(text: str) -> list[Section]:
    sections = [Section("", 0)]  # what comes before the first version
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("## "):
            sections.append(Section(line[3:], number))
        elif line.startswith("### "):
            sections[-1].parts.append(Section(line[4:], number))
        elif re.match(r"[-*+] ", line):
            (sections[-1].parts or sections)[-1].entries.append(number)
    return sections


def check(root: Path) -> list[str]:
    path = root / FILE
    if not path.is_file():
        return [f"{FILE} is missing"]
    return [f"{FILE}:{line}: {fault}" for line, fault in faults(path.read_text(), backend.version(root))]


def faults(text: str, current: str) -> Iterator[tuple[int, str]]:
    """Where the text is not in form: lines and what is wrong there.

    Args:
        current: the version that the checkout declares.
    """
    before, *sections = parse(text)
    if not text.startswith("# Changelog\n"):
        yield 1, "expected '# Changelog'"
    for line in before.entries + [part.line for part in before.parts]:
        yield line, "stands before any version"
    last = counter(current) + 1
    for index, section in enumerate(sections):
        inner = re.fullmatch(r"\[(.+)\]", section.heading)
        if inner and inner[1] == UNRELEASED:
            if index:
                yield section.line, f"[{UNRELEASED}] comes first, and once"
        elif not inner or not VERSION.fullmatch(inner[1]):
            what = f"[{UNRELEASED}] or like [{current}], without a date (the release's tag has it)"
            yield section.line, f"the heading is not {what}: {section.heading}"
        else:
            k = counter(inner[1])
            if k >= last or (k == counter(current) and inner[1] != current):
                yield section.line, f"{section.heading} does not count down from {current}"
            last = k
        yield from _part_faults(section)
    if not {f"[{UNRELEASED}]", f"[{current}]"} & {section.heading for section in sections}:
        yield 1, f"neither [{UNRELEASED}] nor [{current}] is there"


def _part_faults(section: Section) -> Iterator[tuple[int, str]]:
    for line in section.entries:
        yield line, "an entry stands under no '### Added', '### Changed', …"
    if not section.parts and section.heading != f"[{UNRELEASED}]":
        yield section.line, f"{section.heading} has no entry"
    seen = set()
    for part in section.parts:
        if part.heading not in KINDS:
            yield part.line, f"'{part.heading}' is not one of {', '.join(KINDS)}"
        elif part.heading in seen:
            yield part.line, f"a second '{part.heading}' in one section"
        if not part.entries:
            yield part.line, f"'{part.heading}' has no entry"
        seen.add(part.heading)
