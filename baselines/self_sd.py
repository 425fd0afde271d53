"""Self-SD (Draft & Verify, arXiv 2309.08168): a skip set found offline, and an exit threshold that adapts.

The set comes from a file that `baselines.self_sd_search` wrote for this very model, or is spelled out. Its two bit
sets are apart: a layer may lose its attention, its MLP, both or neither.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from clasp_core.checkpoint import fingerprint
from clasp_core.decoding import Turn, Verified
from clasp_core.drafting import ChainRule, ExitRule, FixedExit, SelfDrafter, one_of
from clasp_core.errors import UserError
from clasp_core.skip import LayerSkip
from clasp_core.target import TargetModel

SCHEMA = 1
"""Version of the file's layout; another one is refused."""


@dataclass(frozen=True, slots=True)
class StoredSet:
    """What a file of `data/skip_sets/` says: the set, the model that it was searched for, and what that cost."""

    path: Path
    skip: LayerSkip
    model: Mapping[str, Any]
    search_s: float
    num_evaluations: int

    @classmethod
    def read(cls, path: Path) -> StoredSet:
        """The file's content. Raises UserError if it is absent (naming the search), damaged, or out of range."""
        row = _read_json(path)
        try:
            if row["schema"] != SCHEMA:
                raise UserError(f"{path} has schema {row['schema']!r}, this version reads {SCHEMA}; search again")
            model, found, search = row["model"], row["skip"], row["search"]
            skip = LayerSkip.sublayers(int(model["num_layers"]), attn=found["attn"], mlp=found["mlp"])
            if skip.code != found["code"]:
                raise UserError(f"{path} is damaged: its lists say {skip.code}, its code says {found['code']}")
            return cls(path, skip, model, float(search["seconds"]), int(search["num_evaluations"]))
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path} is no skip set ({type(error).__name__}: {error}); search again") from error
        except UserError as error:
            raise error if str(path) in str(error) else UserError(f"{path}: {error}") from None

    def check(self, target: TargetModel) -> None:
        """Refuse any other model than the one that the set was searched for, naming what differs."""
        found = {"num_layers": target.num_layers, "dtype": str(target.dtype).removeprefix("torch.")}
        found["fingerprint"] = fingerprint(target.model)
        for key, value in found.items():
            if self.model.get(key) != value:
                raise UserError(
                    f"{self.path} was searched for another model ({self.model.get('name')}): its {key} is "
                    f"{self.model.get(key)}, this model's is {value}; search for this one: {_command()}"
                )


class FixedSetPolicy:
    """One set for the whole run, from a file or spelled out as `{attn: [...], mlp: [...]}`; there is no default.

    `stored` is the file's content once a stream has begun (None for a set that is spelled out), so that the cost of
    the offline search can be told.
    """

    def __init__(self, skip_set: str | Mapping[str, Sequence[int]]):
        if not isinstance(skip_set, str) and set(skip_set) != {"attn", "mlp"}:
            raise UserError(f"skip_set is {skip_set!r}; it must be a file, or name both lists: {{attn: [1], mlp: []}}")
        self._skip_set = skip_set
        self.stored: StoredSet | None = None
        self._skip: LayerSkip

    def offline_search_s(self) -> float | None:
        """What the search for the stored set took; unknown for a set that is spelled out."""
        return self.stored.search_s if self.stored is not None else None

    def needs_hidden(self, *, prefill: bool) -> bool:
        """Never."""
        return False

    def start_stream(self, target: TargetModel) -> None:
        """Read the set; refuse one that belongs to another model."""
        if isinstance(self._skip_set, str):
            self.stored = StoredSet.read(Path(self._skip_set))
            self.stored.check(target)
            self._skip = self.stored.skip
        else:
            self._skip = LayerSkip.sublayers(target.num_layers, **self._skip_set)
        if not 0 < self._skip.num_skipped_sublayers < 2 * target.num_layers:
            raise UserError(
                f"skip_set {self._skip_set!r} skips {self._skip.num_skipped_sublayers} of {2 * target.num_layers} "
                f"sub-layers; it must skip 1 to {2 * target.num_layers - 1} (method=ar skips nothing)"
            )

    def start(self, turn: Turn, prompt: Sequence[int], prefill: Verified) -> int:
        """Nothing is searched here."""
        return 0

    def current(self) -> LayerSkip:
        """Always the same set."""
        return self._skip

    def observe(self, verified: Verified) -> int:
        """Nothing to learn."""
        return 0


@dataclass(frozen=True, slots=True)
class Adaptation:
    """How the exit threshold follows acceptance: the published `auto_parameters`, in this order.

    `every`: verifications between updates. `memory`: weight of the past in the running acceptance.
    `wanted`: acceptance below which the threshold rises. `step`: by how much it would move.
    `inertia`: weight of the old threshold. `reset`: it starts anew with each turn, or is carried through the stream.
    """

    every: int
    memory: float
    wanted: float
    step: float
    inertia: float
    reset: Literal["turn", "stream"] = "stream"

    def __post_init__(self) -> None:
        one_of("adaptation.reset", self.reset, ("turn", "stream"))
        if self.every < 1:
            raise UserError(f"adaptation.every is {self.every}; it must be at least 1")
        for name in ("memory", "wanted", "step", "inertia"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"adaptation.{name} is {getattr(self, name)}; it must lie between 0 and 1")


class AdaptiveExit:
    """The published rule (Draft & Verify, `essg`): after a verification of `drafted` tokens,

    m <- memory m + (1 - memory) accepted / drafted, with m = 0 at the start of every turn;
    th' = th + step if m < wanted, else th if drafted = max_draft_len, else th - step;
    th <- inertia th + (1 - inertia) th'.

    As published: since m restarts at 0, every turn begins with a rise; nothing clips th to [0, 1], and beyond these
    bounds it means always and never exit; a draft cut short by the budget counts as a short one. A round without a
    draft changes nothing.
    """

    def __init__(self, start: float, max_draft_len: int, adaptation: Adaptation):
        self._start_at = FixedExit(start).threshold
        self._max_draft_len = max_draft_len
        self._adaptation = adaptation
        self.start_stream()

    @property
    def threshold(self) -> float:
        """The smallest confidence at which drafting goes on."""
        return self._threshold

    @property
    def carried(self) -> bool:
        """The threshold, unless each turn starts anew."""
        return self._adaptation.reset == "stream"

    def start_stream(self) -> None:
        """The threshold is back at its start."""
        self._threshold = self._start_at
        self.start_turn()

    def start_turn(self) -> None:
        """The running acceptance restarts at 0; the threshold is carried on, unless told otherwise."""
        self._acceptance = 0.0
        self._num_verified = 0
        if self._adaptation.reset == "turn":
            self._threshold = self._start_at

    def observe(self, verified: Verified) -> None:
        """One step of the rule."""
        num_drafted = len(verified.draft.tokens)
        if not num_drafted:
            return
        self._num_verified += 1
        if self._num_verified % self._adaptation.every == 0:
            self._update(verified.num_accepted, num_drafted)

    def _update(self, num_accepted: int, num_drafted: int) -> None:
        rule = self._adaptation
        self._acceptance = rule.memory * self._acceptance + (1 - rule.memory) * num_accepted / num_drafted
        wish = self._threshold
        if self._acceptance < rule.wanted:
            wish += rule.step
        elif num_drafted != self._max_draft_len:
            wish -= rule.step
        self._threshold = rule.inertia * self._threshold + (1 - rule.inertia) * wish


def _command() -> str:
    return "python run.py search=self_sd model=NAME"


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"skip set {path} does not exist; search for it ({_command()}), or set method.self_sd.skip_set to another "
            "file, or to lists such as {attn: [1, 3], mlp: [3]}"
        ) from None
    except OSError as error:
        raise UserError(f"cannot read skip set {path}: {error.strerror}; check its path") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); search again: {_command()}") from error


def self_sd(
    skip_set: str | dict[str, list[int]],
    exit_threshold: float,
    max_draft_len: int,
    adaptation: Adaptation | None = None,
    low_confidence_token: Literal["keep", "drop"] = "keep",
    draft_sampling: Literal["sample", "greedy"] = "sample",
) -> SelfDrafter:
    """The method as a drafter; without an adaptation the threshold is fixed."""
    rule: ExitRule = FixedExit(exit_threshold)
    if adaptation is not None:
        rule = AdaptiveExit(exit_threshold, max_draft_len, adaptation)
    return SelfDrafter(FixedSetPolicy(skip_set), rule, ChainRule(max_draft_len, low_confidence_token, draft_sampling))
