"""Self-SD's offline search for a skip set (Draft & Verify, arXiv 2309.08168, searching.py of the authors).

Space: all 2L choices of attention and MLP sub-layers, apart. Optimiser: Optuna's TPE behind a few structured starts.
The authors maximise tokens per second by the wall clock (`tokens_per_s`); on shared machines that is mostly noise, so
the default is the speed-up that the loss ladder predicts (MEASUREMENT 4), from exact counters and costs measured once.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from tqdm import tqdm

from baselines.self_sd_log import WAY_OUT, Evaluation, SearchLog, earlier_search, write_result
from baselines.self_sd_proposals import Bounds, Proposals, structured_starts
from baselines.self_sd_replay import Costs, Counts, Passage, Replay
from clasp_core import provenance
from clasp_core.checkpoint import LoadedModel
from clasp_core.decoding import Answer, Drafter, Generation, Turn, Verified, decode
from clasp_core.device import Clock
from clasp_core.drafting import ChainRule, FixedExit, NoDraft, SelfDrafter, one_of
from clasp_core.errors import Interrupted, UserError
from clasp_core.prompting import Prompter
from clasp_core.sampling import Randomness
from clasp_core.skip import LayerSkip
from clasp_core.target import TargetModel
from clasp_core.tasks import JsonlTask

SCHEMA = 1
"""Version of the result's layout, which `baselines.self_sd` reads."""
ROOT = Path(__file__).resolve().parents[1]
BUDGET = frozenset({"prompts", "evaluations", "seconds", "replace"})
"""Options that do not change what a set is worth."""
NUM_FINALISTS, NUM_REPEATS = 3, 3
"""Sets measured again, and how often, where the objective is a wall clock's."""


@dataclass(frozen=True, kw_only=True)
class SelfSDSearch:
    """Finds a skip set for one model and writes `<model>-self_sd[-<count>].json` with its origin and its cost.

    `evaluations` counts distinct decoded sets, earlier sessions of the same search included; `seconds` (None: no
    limit) likewise, and is looked at between evaluations. `num_skipped_sublayers` fixes the count (a whole layer
    counts two); None leaves it free between `min_share` and `max_share` of 2L. `costs`: by the clock, once at the
    start, or `bytes`, which no slow spell can touch (and in which a wide verification is free). Interrupted, it
    keeps the best so far and ends in a `UserError`; the same command goes on. A file with the result of another search,
    or with a better set, is left alone unless `replace` is set.
    """

    prompts: str
    num_prompts: int
    tokens: int
    evaluations: int
    seconds: float | None
    objective: Literal["predicted", "tokens_per_s"]
    costs: Literal["measured", "bytes"]
    max_draft_len: int
    exit_threshold: float
    num_skipped_sublayers: int | None
    min_share: float
    max_share: float
    seed: int
    replace: bool = False

    def __post_init__(self) -> None:
        one_of("search.objective", self.objective, ("predicted", "tokens_per_s"))
        one_of("search.costs", self.costs, ("measured", "bytes"))
        FixedExit(self.exit_threshold)
        for name, fewest in (("num_prompts", 1), ("tokens", 3), ("evaluations", 1), ("max_draft_len", 1)):
            if getattr(self, name) < fewest:
                raise UserError(f"search.{name} is {getattr(self, name)}; it must be at least {fewest}")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"search.seed is {self.seed}; it must lie between 0 and {2**32 - 1}")
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise UserError(f"search.seconds is {self.seconds}; it must be a positive number, or null for no limit")
        if not 0 <= self.min_share <= self.max_share <= 1:
            raise UserError(f"search.min_share {self.min_share} and max_share {self.max_share} must ascend in [0, 1]")

    def run(self, model: LoadedModel, prompter: Prompter, clock: Clock, out_dir: Path) -> Path:
        """Search, and write the best set found; returns the path of the result."""
        bounds = self.bounds(model.target.num_layers)
        prompts = self._prompts(model, prompter)
        count = "" if self.num_skipped_sublayers is None else f"-{self.num_skipped_sublayers}"
        path = out_dir / f"{model.name}-self_sd{count}.json"
        out_dir.mkdir(parents=True, exist_ok=True)
        settings = self._settings(model, prompts)
        self._check_place(path, settings)
        log = SearchLog(path.with_suffix(".jsonl"), provenance.config_hash(settings))
        try:
            with torch.inference_mode():
                session = _Session(self, model, prompts, clock, log)
                status = session.search(bounds)
                best = session.choose()
        except KeyboardInterrupt:
            raise Interrupted("interrupted before there was a result; the same command goes on") from None
        self._check_value(path, best)
        write_result(path, self._result(model, settings, log, best, status))
        print(f"{status}: {len(log.evaluations)} distinct sets in {log.seconds:.0f} s; {_said(best)}")
        if status == "interrupted":
            raise Interrupted(f"interrupted; the best set so far is in {path}, and the same command goes on")
        return path

    def _check_place(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Refuse to replace the result of another search, before this one takes its time."""
        earlier = None if self.replace else earlier_search(path)
        if earlier is None:
            return
        stored = earlier.get("settings")
        if not isinstance(stored, dict):
            raise UserError(f"{path} is there and does not say how it was found; {WAY_OUT}")
        if keys := provenance.differing(stored, _stored(settings)):
            raise UserError(f"{path} holds the result of another search ({', '.join(keys)} differ); {WAY_OUT}")

    def _check_value(self, path: Path, best: Evaluation) -> None:
        """Refuse to replace a better set; every evaluation stays in the log beside it."""
        earlier = None if self.replace else earlier_search(path)
        if earlier is not None and earlier.get("value", -math.inf) > best.value:
            raise UserError(f"{path} holds a better set ({earlier['value']:.4g} against {best.value:.4g}); {WAY_OUT}")

    def bounds(self, num_layers: int) -> Bounds:
        """The counts that are searched; at least one sub-layer is skipped."""
        if self.num_skipped_sublayers is None:
            return Bounds(
                num_layers,
                max(1, math.ceil(self.min_share * 2 * num_layers)),
                max(1, math.floor(self.max_share * 2 * num_layers)),
            )
        if not 1 <= self.num_skipped_sublayers <= 2 * num_layers:
            raise UserError(
                f"search.num_skipped_sublayers is {self.num_skipped_sublayers}; this model has {2 * num_layers} "
                "sub-layers, two for each layer"
            )
        return Bounds(num_layers, self.num_skipped_sublayers, self.num_skipped_sublayers)

    def _prompts(self, model: LoadedModel, prompter: Prompter) -> list[list[int]]:
        """Ids of the first turns of the first search prompts."""
        if not Path(self.prompts).is_file():
            raise UserError(f"search.prompts {self.prompts} does not exist; name a JSONL file of questions")
        questions = JsonlTask("search_prompts", self.prompts).questions()
        if len(questions) < self.num_prompts:
            raise UserError(f"search.num_prompts is {self.num_prompts}, but {self.prompts} has {len(questions)}")
        prompts = [prompter.ids(question.turns[:1], []) for question in questions[: self.num_prompts]]
        longest = max(map(len, prompts)) + self.tokens
        if longest > model.max_positions:
            raise UserError(f"search prompts and tokens need {longest} positions, the model has {model.max_positions}")
        return prompts

    def _settings(self, model: LoadedModel, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """What decides which sets are decoded and what they are worth; a search is continued where this is equal."""
        own = {name: value for name, value in asdict(self).items() if name not in BUDGET}
        return {
            **own,
            "prompts_sha256": hashlib.sha256(json.dumps([list(ids) for ids in prompts]).encode()).hexdigest(),
            "model_fingerprint": model.info["fingerprint"],
            "machine": {"machine": provenance.machine(), "accelerators": provenance.accelerators()},
            "threads": provenance.threads(),
        }

    def _result(
        self, model: LoadedModel, settings: dict[str, Any], log: SearchLog, best: Evaluation, status: str
    ) -> dict[str, Any]:
        skip = best.skip
        return {
            "schema": SCHEMA,
            "method": "self_sd",
            "model": {
                "name": model.name,
                "label": model.label,
                "num_layers": model.target.num_layers,
                "dtype": str(model.target.dtype).removeprefix("torch."),
                "fingerprint": model.info["fingerprint"],
            },
            "skip": {
                "attn": list(skip.skipped_attn),
                "mlp": list(skip.skipped_mlp),
                "code": skip.code,
                "num_skipped_sublayers": skip.num_skipped_sublayers,
            },
            "search": {
                "objective": self.objective,
                "value": best.value,
                "acceptance": best.counts.acceptance,
                "counts": best.to_json()["counts"],
                "num_evaluations": len(log.evaluations),
                "seconds": round(log.seconds, 1),
                "status": status,
                "costs": (log.ground or {}).get("costs"),
                "budget": {"evaluations": self.evaluations, "seconds": self.seconds},
                "settings": _stored(settings),
            },
            "end": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "git": provenance.git_state(ROOT),
            "versions": provenance.package_versions((*provenance.PACKAGES, "optuna")),
            "machine": settings["machine"],
            "threads": settings["threads"],
        }


class _Session:
    """One stretch of a search: the ground (found out, or read back), then evaluations until something ends it."""

    def __init__(
        self, options: SelfSDSearch, model: LoadedModel, prompts: list[list[int]], clock: Clock, log: SearchLog
    ):
        self._options = options
        self._target = model.target
        self._generation = Generation(options.tokens, frozenset(model.stop_ids))
        self._prompts = prompts
        self._clock = clock
        self._log = log
        self._since = clock.now()
        if log.ground is None:
            log.lay_ground(self._find_ground(), self._lap())
        assert log.ground is not None
        self._costs = _costs_of(log.ground["costs"])
        pairs = zip(prompts, log.ground["answers"], strict=True)
        passages = [Passage(tuple(prompt), tuple(answer)) for prompt, answer in pairs]
        if all(len(passage.answer) < 2 for passage in passages):
            raise UserError("the model ends every answer at once; there is nothing to draft, take other prompts")
        self._replay = Replay(self._target, passages, self._generation, options.max_draft_len, options.exit_threshold)

    def search(self, bounds: Bounds) -> str:
        """Decode sets until the budget, the time or the space ends, or Ctrl-C; says which."""
        options, log = self._options, self._log
        starts = structured_starts(bounds, self._replay.influence, self._costs)
        proposals = Proposals(bounds, starts, options.seed)
        with tqdm(total=options.evaluations, initial=len(log.evaluations), unit="set", disable=None) as bar:
            try:
                while len(log.evaluations) < options.evaluations:
                    skip = proposals.next()
                    if skip is None:
                        return f"space exhausted ({bounds.num_sets} sets)"
                    if skip not in log.evaluations:
                        if options.seconds is not None and log.seconds >= options.seconds:
                            return "time used up"
                        value, counts = self._evaluate(skip)
                        log.add(Evaluation(skip, value, counts, self._lap()))
                        bar.set_postfix_str(_said(log.best()[0]))
                        bar.update()
                    proposals.tell(skip, log.evaluations[skip].value)
            except KeyboardInterrupt:
                return "interrupted"
        return "budget used up"

    def choose(self) -> Evaluation:
        """The best set; where the value is a wall clock's, the best of a few after measuring them again."""
        if not self._log.evaluations:
            raise UserError("no set was decoded before the search ended; raise search.seconds, or start it again")
        if self._options.objective == "predicted":
            return self._log.best()[0]
        finalists = self._log.best(NUM_FINALISTS)
        repeats = [[self._evaluate(each.skip)[0] for each in finalists] for _ in range(NUM_REPEATS)]
        values = [median(column) for column in zip(*repeats, strict=True)]
        self._log.seconds += self._lap()
        again = [replace(each, value=value) for each, value in zip(finalists, values, strict=True)]
        return max(again, key=lambda each: each.value)

    def _lap(self) -> float:
        """Seconds since the last lap, or since the session began."""
        before, self._since = self._since, self._clock.now()
        return self._since - before

    def _find_ground(self) -> dict[str, Any]:
        """The target's answers and the costs of its passes."""
        answers = [self._answer(prompt, NoDraft()).output_ids for prompt in tqdm(self._prompts, disable=None)]
        if self._options.costs == "bytes":
            costs = Costs.by_bytes(self._target)
        else:
            typical = sorted(self._prompts, key=len)[len(self._prompts) // 2]
            costs = Costs.measured(self._target, typical, self._options.max_draft_len + 1, self._clock)
        return {"answers": answers, "costs": asdict(costs)}

    def _evaluate(self, skip: LayerSkip) -> tuple[float, Counts]:
        if self._options.objective == "predicted":
            counts = self._replay.counts(skip)
            return self._costs.predicted(skip, counts), counts
        return self._tokens_per_s(skip)

    def _tokens_per_s(self, skip: LayerSkip) -> tuple[float, Counts]:
        """Emitted tokens over end-to-end time of real runs (the authors count the budget, whatever was emitted)."""
        chain = ChainRule(self._options.max_draft_len)
        drafter = SelfDrafter(_Candidate(skip), FixedExit(self._options.exit_threshold), chain)
        counts, num_tokens, seconds = Counts(), 0, 0.0
        for prompt in self._prompts:
            answer = self._answer(prompt, drafter)
            num_tokens += len(answer.output_ids)
            seconds += answer.prefill_s + answer.decode_s
            rounds = answer.rounds
            for numbers in zip(rounds.num_drafted, rounds.num_accepted, rounds.num_emitted, strict=True):
                counts.add(*numbers)
        return num_tokens / seconds, counts

    def _answer(self, prompt: Sequence[int], drafter: Drafter) -> Answer:
        drafter.start_stream(self._target)
        return decode(self._target, drafter, prompt, self._generation, Randomness.seeded(0), self._clock)


class _Candidate:
    """The policy of a set that is being tried."""

    def __init__(self, skip: LayerSkip):
        self._skip = skip

    def needs_hidden(self, *, prefill: bool) -> bool:
        return False

    def start_stream(self, target: TargetModel) -> None:
        pass

    def start(self, turn: Turn, prompt: Sequence[int], prefill: Verified) -> int:
        return 0

    def current(self) -> LayerSkip:
        return self._skip

    def observe(self, verified: Verified) -> int:
        return 0


def _said(best: Evaluation) -> str:
    acceptance = "" if best.counts.acceptance is None else f", acceptance {best.counts.acceptance:.3f}"
    return f"best {best.value:.4g} with {best.skip.num_skipped_sublayers} sub-layers skipped{acceptance}"


def _costs_of(row: Mapping[str, Any]) -> Costs:
    by_width = tuple((int(width), float(cost)) for width, cost in row["by_width"])
    return Costs(row["fixed"], tuple(row["attn"]), tuple(row["mlp"]), by_width)


def _stored(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as a result holds them."""
    return {name: value for name, value in settings.items() if name not in ("machine", "threads")}
