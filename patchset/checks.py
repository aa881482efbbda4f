"""A list of named checks, and what came of them."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from . import PatchsetError


class Unknown(PatchsetError):
    """The check cannot be made here; the message says what is missing."""


@dataclass(frozen=True)
class Check:
    name: str
    make: Callable[[], str]  # says what holds, or raises PatchsetError
    needs: tuple[str, ...] = ()  # checks without which it cannot be made


@dataclass(frozen=True)
class Result:
    name: str
    ok: bool | None  # None: not made
    text: str

    def __str__(self) -> str:
        return f"{ {True: 'ok', False: 'FAIL', None: '?'}[self.ok]:<5} {self.name}: {self.text}"


@dataclass(frozen=True)
class Report:
    results: list[Result]

    @property
    def failed(self) -> Result | None:
        """The first check that failed."""
        return next((result for result in self.results if result.ok is False), None)

    def __str__(self) -> str:
        return "\n".join(map(str, self.results))

    def json(self, **more: object) -> str:
        failed = self.failed
        rows = [{"name": r.name, "ok": r.ok, "text": r.text} for r in self.results]
        return json.dumps({**more, "ok": not failed, "failed": failed and failed.name, "checks": rows})


def run(checks: Iterable[Check]) -> Report:
    """Make the checks in order; one whose needs failed is not made."""
    results: dict[str, Result] = {}
    for check in checks:
        lacking = [name for name in check.needs if not results[name].ok]
        try:
            if lacking:
                raise Unknown(f"not checked, since {lacking[0]} did not pass")
            ok, text = True, check.make()
        except Unknown as why:
            ok, text = None, str(why)
        except PatchsetError as why:
            ok, text = False, str(why)
        results[check.name] = Result(check.name, ok, "; ".join(text.split("\n")))
    return Report(list(results.values()))
