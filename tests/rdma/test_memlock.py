"""A limit on locked memory that is too small is an error that says what to set."""

from __future__ import annotations

import pytest

from children import actions, locking
from rdma.conftest import OWNER, End

pytestmark = [pytest.mark.rdma("rc"), pytest.mark.timeout(300)]


def test_registering_more_than_may_be_locked() -> None:
    with End(OWNER, fresh=True) as owner:
        outcome = owner.call(locking.register, 4 << 20, 1 << 20)
        assert outcome.kind == "LlmOutOfMemory", outcome
        assert "ulimit -l" in outcome.message
        # Nothing is left of it, and what fits is registered.
        owner.call(actions.make_cache, "kv", 2, (1, 50_000))
        owner.call(actions.drop_cache, "kv")
