"""One rank's part in a job: it says what it has, hears what the others have, and settles decisions with them.

Nothing here is collective. A decision is one exchange with the store: the first writer wins, everybody else follows, and a
rank that cannot follow moves the job on to a kernel that all can run.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

import msgspec

from lz_compile.ground import events, health
from lz_compile.ground.records import Reason
from lz_compile.runtime.choose.agreed import Agreed, Agreement
from lz_compile.runtime.choose.problem import Decision, Problem
from lz_compile.runtime.choose.select import select
from lz_compile.runtime.kernels import registry
from lz_compile.runtime.kernels.kernel import KernelSpec
from lz_compile.runtime.measure.estimate import INDUCTOR
from lz_compile.runtime.policy.resolved import Policy
from lz_compile.runtime.policy.settings import RanksSettings
from lz_compile.runtime.problem import decision_tree
from lz_compile.runtime.ranks import cards
from lz_compile.runtime.ranks.cards import Card, Heard, News, listed
from lz_compile.runtime.ranks.problem_key import ProblemKey, key_of
from lz_compile.runtime.ranks.store import JobStore, StoreGoneError
from lz_compile.runtime.tables.loaded import Loaded

#: A job moves on from a kernel at most this often for one problem: there are not that many kernels.
_MOST_MOVES = 64
#: How long ranks that were not heard are asked for again, at most, between two looks.
_PAUSE_S = 0.02
#: How many of these are asked for in one look.
_AT_ONCE = 64

Kept = TypeVar("Kept")
#: Why a kernel proves wrong on this rank; None: it is right.
WhyNot: TypeAlias = Callable[[KernelSpec], Reason | None]


_cards, _tables = msgspec.json.Decoder(Card), msgspec.json.Decoder(dict[str, dict[str, str]])
_news = msgspec.json.Decoder(News)


@dataclass(frozen=True)
class Question:
    """What is to be decided.

    Args:
        why_not: proves a kernel before it becomes the job's (None: nothing is to be proven).
    """

    problem: Problem
    policy: Policy
    tables: Sequence[Loaded] | None = None
    why_not: WhyNot | None = None

    @cached_property
    def key(self) -> ProblemKey:
        """Under which the job keeps what it decides."""
        return key_of(self.problem, self.policy)

    def selected(self, elsewhere: Mapping[str, Reason], agreed: Agreed | None = None) -> Decision:
        """What this rank takes, without kernels that are not for all, or what was agreed on."""
        return select(self.problem, self.policy, self.tables, elsewhere=elsewhere, agreed=agreed)


class Job:
    """A rank of a job.

    Args:
        store: a store of ``torch.distributed`` that all ranks have, for ``size`` ranks.
        rank: this one, from 0 on.
        size: how many there are.
        settings: time limits, and what follows from different versions.
        wishes: a hash of the policy, to tell who has another one.
    """

    def __init__(self, store: Any, rank: int, size: int, settings: RanksSettings, wishes: str = "") -> None:
        self.rank, self.size, self.settings, self._wishes = rank, size, settings, wishes
        self.store = JobStore(store, settings.timeout_s)
        self._lock = threading.RLock()
        self._heard = Heard(missing={*range(size)} - {rank})
        self._kinds = cards.kinds_here()
        self._versions: tuple[int, ...] = ()
        try:
            self._write_card()
        except StoreGoneError as error:  # who decides is told so, every time
            events.record("STORE_LOST", f"rank {rank} could not say what it has", error)

    # ---- decisions ----------------------------------------------------------------------------------------------------

    def decide(self, asked: Question, *, writes: bool = True) -> Decision:
        """The kernel for a problem, the same on every rank that can run it.

        Args:
            writes: whether what this rank would take becomes the job's decision where there is none.

        Raises:
            StoreGoneError: the store cannot be asked; what was settled by then is still known.
            RanksDifferError: ranks run different versions and the policy refuses that.
        """
        key = asked.key
        settled = self._still_settled(key)
        if settled is None:
            self._hear(key.kind)
            elsewhere = self._elsewhere(asked.problem, key.kind)
            data = self.store.get(f"decision/{key.key}")
            if data is None:
                if not writes:
                    return asked.selected(elsewhere)
                # Nobody waits for this proof: a rank that is done with its own by then decides instead.
                decision, failed = self._proven(asked, elsewhere)
                wanted = msgspec.structs.replace(self._agreed(decision, key), passed_over=failed)
                data = self._exchange(key, b"", wanted.encoded())
                if data == wanted.encoded():
                    self._heard.settled[key.key] = wanted
                    return self._shared(decision, wanted, key)
            settled = self._heard.settled[key.key] = self._decoded(data, Agreed.decoded)
            self._tell_other(settled, asked.problem)
        return self._followed(settled, asked, writes=writes)

    def _still_settled(self, key: ProblemKey) -> Agreed | None:
        """What this rank knows to be agreed on; None where it has to ask, as others have moved on.

        It stays where the store is lost, of which whoever decides is told.
        """
        settled = self._heard.settled.get(key.key)
        if settled is None or self.store.gone:
            return settled
        try:
            data = self.store.get(f"decision/{key.key}")
            if data is None:
                raise self.store.give_up("what was agreed on is no longer in it")
            if self._decoded(data, Agreed.decoded) == settled:
                return settled
            self.refresh()
        except StoreGoneError:
            return settled
        if self._heard.settled.pop(key.key, None) is not None and self._heard.taken.get(key.key):
            text = f"this rank has compiled {settled.kernel}, and the others agree on something else by now"
            events.record("RANKS_APART", f"{text} (problem {key.key})")
        return None

    def move_on(self, failed: Mapping[str, Reason], asked: Question) -> Decision:
        """What the job runs instead of kernels that it agreed on, and that this rank cannot run.

        Args:
            failed: kernels that failed here for this problem, and why.

        Raises:
            StoreGoneError: the store cannot be asked.
        """
        key = asked.key
        for _ in range(_MOST_MOVES):
            data = self.store.get(f"decision/{key.key}")
            if data is None:
                raise self.store.give_up("what was agreed on is no longer in it")
            held = self._decoded(data, Agreed.decoded)
            passed_over = {**held.passed_over}
            for kernel_id, reason in failed.items():
                passed_over.setdefault(kernel_id, (self.rank, reason.message))
            elsewhere = self._elsewhere(asked.problem, key.kind) | cards.passed_over(passed_over)
            if passed_over == held.passed_over:  # the job is beyond all of them
                self._heard.settled[key.key] = held
                found = asked.selected(elsewhere, self._here(held, key))
                if found.refused_agreed is None:
                    return self._shared(found, held, key)
                failed = {**failed, held.kernel: found.refused_agreed}
                continue
            found, wrong = self._proven(asked, elsewhere)
            passed_over |= wrong
            wanted = msgspec.structs.replace(self._agreed(found, key), passed_over=passed_over)
            if self._exchange(key, data, wanted.encoded()) == wanted.encoded():
                self._heard.settled[key.key] = wanted
                why = "; ".join(f"{name}: {reason.message}" for name, reason in failed.items())
                news = News(rank=self.rank, key=key.key, kernel=held.kernel, why=why)
                self._publish(news)
                if held.kernel in self._heard.taken.get(key.key, ()):  # for another match
                    self._tell_moved(news)
                return self._shared(found, wanted, key)
        raise self.store.give_up(f"the job moved on {_MOST_MOVES} times for one problem")

    def take(self, decision: Decision) -> None:
        """Note that this rank has compiled what was decided."""
        if decision.agreement is not None:
            self._heard.taken.setdefault(decision.agreement.key, set()).add(decision.kernel.kernel_id)

    def _proven(self, asked: Question, elsewhere: Mapping[str, Reason]) -> tuple[Decision, dict[str, tuple[int, str]]]:
        """What this rank takes and has proven, and what proved wrong before, as it is kept."""
        failed: dict[str, tuple[int, str]] = {}
        while True:
            found = asked.selected({**elsewhere, **cards.passed_over(failed)})
            if (known := failed.get(found.kernel.kernel_id)) is not None:
                text = f"{asked.problem.context.operation}: {found.kernel.kernel_id} is the last one that may run"
                events.record("RANKS_LAST_RESORT", f"{text}, although {known[1]}")
                return found, failed
            why = None if asked.why_not is None else asked.why_not(found.kernel)
            if why is None:
                return found, failed
            failed[found.kernel.kernel_id] = (self.rank, why.message)

    def _followed(self, settled: Agreed, asked: Question, *, writes: bool) -> Decision:
        found = asked.selected(cards.passed_over(settled.passed_over), self._here(settled, asked.key))
        refused = found.refused_agreed
        if refused is not None and writes:
            events.record(refused.code, f"{asked.problem.context.operation}: {refused.message}")
            return self.move_on({settled.kernel: refused}, asked)
        return self._shared(found, settled, asked.key)

    def _agreed(self, decision: Decision, key: ProblemKey) -> Agreed:
        """A decision as it is kept."""
        tree = None if decision.tree is None else decision_tree.to_dict(decision.tree)
        found = Agreed(
            kernel=decision.kernel.kernel_id,
            identity=cards.identity(decision.kernel),
            why=decision.why,
            rank=self.rank,
            tree=tree,
        )
        return found.named(key.names)

    def _here(self, agreed: Agreed, key: ProblemKey) -> Agreed:
        """What was agreed on, with the names that symbols have here."""
        return agreed.named({there: here for here, there in key.names.items()})

    def _shared(self, decision: Decision, agreed: Agreed, key: ProblemKey) -> Decision:
        """A decision that says with whom it is shared, or that it is not."""
        others = sum(key.kind in card.kinds for rank, card in self._heard.cards.items() if rank != self.rank)
        passed_over = {
            name: f"rank {rank} cannot run {name} ({why})" for name, (rank, why) in agreed.passed_over.items()
        }
        agreement = Agreement(key.key, others, agreed.rank, passed_over)
        if decision.kernel.kernel_id != agreed.kernel and decision.tree is None:
            text = f"the ranks agreed on {agreed.kernel}, and this one runs {decision.kernel.kernel_id}: {decision.why}"
            events.record("RANKS_APART", text)
            return replace(decision, why=f"{decision.why}; {text}", agreement=agreement)
        return replace(decision, why=f"{decision.why} ({agreement})", agreement=agreement)

    def _tell_other(self, agreed: Agreed, problem: Problem) -> None:
        """An event where a kernel of that name is another one here than on the rank that decided."""
        spec = registry.kernels(problem.context.operation).get(agreed.kernel)
        if spec is not None and spec.kernel_id != INDUCTOR and cards.identity(spec) != agreed.identity:
            events.record("RANKS_DIFFER", f"{agreed.kernel} is another one here than on rank {agreed.rank}")

    def _exchange(self, key: ProblemKey, expected: bytes, value: bytes) -> bytes:
        found = self.store.exchange(f"decision/{key.key}", expected, value)
        if not self.store.has([f"card/{self.rank}"]):
            raise self.store.give_up("what this rank wrote into it is gone")
        return found

    # ---- the others ---------------------------------------------------------------------------------------------------

    @property
    def settled(self) -> Mapping[str, Agreed]:
        """What was agreed on, as far as this rank asked, by the problem's key."""
        return dict(self._heard.settled)

    @property
    def heard(self) -> Mapping[int, Card]:
        """The cards of the ranks that were heard by now, this one's among them."""
        return dict(self._heard.cards)

    def refresh(self) -> None:
        """Hear what the others have said since.

        Raises:
            StoreGoneError: the store cannot be asked.
        """
        with self._lock:
            self._read_missing()
            for news in self._read_news():
                self._take(news)

    def _hear(self, kind: str) -> None:
        """Say what changed here, hear what changed elsewhere; the first time, wait for those who have said nothing yet."""
        with self._lock:
            if kind not in self._kinds:
                self._kinds = (*self._kinds, kind)
                self._versions = ()
            if self._versions != (registry.version(), health.version()):
                self._write_card()
                self._publish(News(rank=self.rank))
            if not self._heard.has_waited:
                self._wait()
            self.refresh()
            self._tell_differences()

    def _wait(self) -> None:
        self._heard.has_waited = True
        deadline = time.monotonic() + self.settings.timeout_s
        self._read_missing()
        while self._heard.missing and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
            self._read_missing()
        if self._heard.missing:
            text = f"{listed(self._heard.missing)} said nothing within {self.settings.timeout_s:g} s"
            events.record("RANKS_NOT_HEARD", f"{text}; what they cannot run will be known when they come")

    def _read_missing(self) -> None:
        """The cards of ranks that were not heard before; of very many, of some at a time."""
        missing = sorted(self._heard.missing)
        for rank in missing if len(missing) <= _AT_ONCE else random.sample(missing, _AT_ONCE):
            self._read_card(rank)

    def _read_card(self, rank: int) -> None:
        data = self.store.get(f"card/{rank}")
        if data is None:
            return
        card = self._decoded(data, _cards.decode)
        if card.table not in self._heard.tables:
            table = self.store.get(f"table/{card.table}")
            if table is None:  # it is written before the card
                raise self.store.give_up(f"the kernels of rank {rank} are not in it")
            self._heard.tables[card.table] = self._decoded(table, _tables.decode)
        self._heard.cards[rank], self._heard.is_told = card, False
        self._heard.missing.discard(rank)

    def _write_card(self) -> None:
        self._versions = (registry.version(), health.version())
        table = cards.own_table()
        name, data = cards.encoded(table)
        card = Card.of(self.rank, self._wishes, self._kinds, name)
        self.store.set(f"table/{name}", data)
        self.store.set(f"card/{self.rank}", msgspec.json.encode(card))
        self._heard.cards[self.rank], self._heard.tables[name] = card, table

    def _elsewhere(self, problem: Problem, kind: str) -> dict[str, Reason]:
        """Why kernels are not for all ranks of a kind."""
        same = [card for card in self._heard.cards.values() if kind in card.kinds]
        return cards.not_everywhere(problem.context.op, self.rank, same, self._heard.tables, self.settings.versions)

    def _tell_differences(self) -> None:
        if not self._heard.is_told:
            cards.tell(cards.differences(self._heard.cards.values()), self.settings.versions)
            self._heard.is_told = True

    # ---- news -----------------------------------------------------------------------------------------------------------

    def _publish(self, news: News) -> None:
        """Append to the news, which nobody overwrites."""
        data = msgspec.json.encode(news)
        with self._lock:
            while self.store.exchange(f"news/{self._heard.seen}", b"", data) != data:
                for other in self._read_news():
                    self._take(other)
            self._heard.seen += 1

    def _read_news(self) -> Iterator[News]:
        while (data := self.store.get(f"news/{self._heard.seen}")) is not None:
            self._heard.seen += 1
            yield self._decoded(data, _news.decode)

    def _take(self, news: News) -> None:
        if news.rank == self.rank:
            return
        if not news.key:
            return self._read_card(news.rank)
        settled = self._heard.settled.pop(news.key, None)
        if settled is not None and settled.kernel == news.kernel:
            self._tell_moved(news)

    def _tell_moved(self, news: News) -> None:
        text = f"rank {news.rank} cannot run {news.kernel}, which this rank has compiled by now: {news.why}"
        events.record("RANKS_MOVED_ON", f"{text} (problem {news.key}). Call torch._dynamo.reset() here to follow")

    def _decoded(self, data: bytes, decode: Callable[[bytes], Kept]) -> Kept:
        """What is kept in the store.

        Raises:
            StoreGoneError: it is something else than this version writes.
        """
        try:
            return decode(data)
        except ValueError as error:  # msgspec's errors are
            raise self.store.give_up(f"it holds something that is not ours: {error}") from error
