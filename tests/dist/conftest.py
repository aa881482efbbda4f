import pytest

from tests.dist.world import World

_worlds: dict[int, World] = {}


@pytest.fixture(scope="session")
def world():
    """``world(size, fn, *args, **kwargs)``: run ``fn`` on every rank of a gloo world; the results by rank."""

    def run(size, fn, *args, **kwargs):
        if size not in _worlds:
            _worlds[size] = World(size)
        return _worlds[size](fn, *args, **kwargs)

    yield run
    for open_world in _worlds.values():
        open_world.close()
