"""What the paper shows of the programme itself, apart from speed (its Figures 3a and 3b), as rows of `analysis.jsonl`.

Both read the states of a greedy answer under the full model: its text goes through the model once, and the programme
then runs at answer tokens as it would after verifying them. Only first turns are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from tqdm import tqdm

from clasp_core.attention import Span
from clasp_core.clasp import check_one_count, select_layers, skip_count
from clasp_core.decoding import Generation, decode
from clasp_core.device import Clock
from clasp_core.drafting import NoDraft
from clasp_core.errors import UserError
from clasp_core.kv_cache import KVCache
from clasp_core.prompting import Prompter
from clasp_core.records import Question
from clasp_core.sampling import Randomness
from clasp_core.skip import LayerSkip
from clasp_core.target import TargetModel, forward

MOST_FREE = 16
"""Free layers beyond which trying all 2^n sets at every position is no longer a matter of minutes."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and its greedy answer of `num_tokens`, gone through the full model.

    `hidden` has L + 1 tensors `num_tokens d`, the states of the answer's tokens; the cache holds the whole text.
    """

    target: TargetModel
    cache: KVCache
    num_prompt: int
    hidden: tuple[Tensor, ...]

    @property
    def num_tokens(self) -> int:
        """Length of the answer."""
        return len(self.hidden[0])

    def position(self, index: int) -> int:
        """The slot of an answer token."""
        return self.num_prompt + index

    def states(self, index: int) -> list[Tensor]:
        """An answer token's states before and after every layer: L + 1 of `1 d`."""
        return [states[index : index + 1] for states in self.hidden]


class Analysis(Protocol):
    """What an entry of `conf/analysis/` builds."""

    def check(self, target: TargetModel) -> None:
        """Refuse a target that does not fit."""

    def indices(self, num_tokens: int) -> range:
        """Which tokens of an answer of that length are looked at."""

    def at(self, text: Text, index: int) -> list[Row]:
        """The rows of one answer token; each has a `kind`."""


class RowStore(Protocol):
    """Where rows go; `store.RunStore` is the one in use."""

    def append_analysis(self, rows: Sequence[Row]) -> None:
        """Write the rows of one token."""


@dataclass(frozen=True, slots=True)
class Reader:
    """Answers questions by autoregressive decoding, and keeps the states of the answers."""

    target: TargetModel
    prompter: Prompter
    generation: Generation
    clock: Clock

    def run(self, analysis: Analysis, questions: Sequence[Question], store: RowStore) -> None:
        """Every question's text, token by token, into the store; silent where the output is no terminal."""
        with tqdm(total=len(questions), unit="question", disable=None, dynamic_ncols=True) as bar:
            for question in questions:
                text = self.read(question)
                num_places = len(analysis.indices(text.num_tokens))
                for done, rows in enumerate(rows_of(analysis, text, question), start=1):
                    store.append_analysis(rows)
                    bar.set_postfix_str(f"token {done} of {num_places}")
                bar.update()

    @torch.inference_mode()
    def read(self, question: Question) -> Text:
        """A question's first turn and its answer."""
        prompt = self.prompter.ids(question.turns[:1], [])
        answer = decode(self.target, NoDraft(), prompt, self.generation, Randomness.seeded(0), self.clock).output_ids
        tokens = torch.tensor([*prompt, *answer], device=self.target.devices[0])
        cache = self.target.new_cache(len(tokens))
        span, rows = Span.causal(0, len(tokens)), slice(len(prompt), None)
        hidden = forward(self.target, tokens, span, cache, rows=rows, keep_hidden=True).hidden
        assert hidden is not None
        return Text(self.target, cache, len(prompt), hidden)


def rows_of(analysis: Analysis, text: Text, question: Question) -> Iterator[list[Row]]:
    """The rows of one question, token by token, with where they come from."""
    where = {"task": question.task, "category": question.category, "question_id": question.question_id, "turn": 0}
    for index in analysis.indices(text.num_tokens):
        with torch.inference_mode():
            found = analysis.at(text, index)
        yield [{**row, **where, "position": index} for row in found]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSkipSets:
    """Figure 3a: the set that the programme chooses at every `every`-th token of an answer.

    `num_skipped` or `skip_ratio` (of L, rounded) sets M, one of them.
    """

    num_skipped: int | None
    skip_ratio: float | None
    every: int

    def __post_init__(self) -> None:
        _check_every(self.every)
        check_one_count(self.num_skipped, self.skip_ratio)

    def check(self, target: TargetModel) -> None:
        """Refuse a count outside 0 < M < L."""
        skip_count(self.num_skipped, self.skip_ratio, target.num_layers)

    def indices(self, num_tokens: int) -> range:
        """Every `every`-th token."""
        return range(0, num_tokens, self.every)

    def at(self, text: Text, index: int) -> list[Row]:
        """One row `token_skip_set`, with the set as a `LayerSkip.code`."""
        num_skipped = skip_count(self.num_skipped, self.skip_ratio, text.target.num_layers)
        found = select_layers(text.target, text.cache, text.states(index), text.position(index), num_skipped)
        return [{"kind": "token_skip_set", "num_skipped": num_skipped, "skip": found.skip.code}]


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionQuality:
    """Figure 3b: how near the programme's set comes to the best one, where trying all sets is feasible.

    `num_free` layers in the middle may be skipped, the first and last ones stay; `counts` are the M that are
    compared. A set's quality is the cosine of the state after the last layer (before the final norm) with the full
    model's. All sets are tried, so the figures for random sets are exact and no sample. `batch` sets go through a
    layer at once.
    """

    num_free: int
    counts: Sequence[int]
    every: int
    batch: int

    def __post_init__(self) -> None:
        _check_every(self.every)
        if not 1 <= self.num_free <= MOST_FREE:
            raise UserError(
                f"num_free is {self.num_free}: all 2^{self.num_free} sets would be tried; choose 1 to {MOST_FREE}"
            )
        if not self.counts or not all(1 <= count <= self.num_free for count in self.counts):
            raise UserError(
                f"counts is {list(self.counts)}; give one or more, each from 1 to num_free, which is {self.num_free}"
            )
        if self.batch < 1:
            raise UserError(f"batch is {self.batch}; it must be at least 1")

    def check(self, target: TargetModel) -> None:
        """Refuse a target with too few layers; one must stay."""
        if self.num_free >= target.num_layers:
            raise UserError(
                f"num_free is {self.num_free}, but the model has {target.num_layers} layers and one must stay; "
                f"choose at most {target.num_layers - 1}"
            )

    def indices(self, num_tokens: int) -> range:
        """Every `every`-th token."""
        return range(0, num_tokens, self.every)

    def at(self, text: Text, index: int) -> list[Row]:
        """One row `selection_quality` for each count."""
        nearness = self.every_set(text, index)
        return [self._row(text, index, count, nearness) for count in self.counts]

    def free(self, num_layers: int) -> range:
        """The layers that may be skipped: as many before them as after, or one fewer."""
        first = (num_layers - self.num_free) // 2
        return range(first, first + self.num_free)

    def every_set(self, text: Text, index: int) -> dict[LayerSkip, float]:
        """The cosine of every set whose size is wanted.

        States of one token under different sets go through a layer as siblings, and sets part where they differ:
        what they share is computed once.
        """
        num_layers, states = text.target.num_layers, text.states(index)
        free = self.free(num_layers)
        rows: Tensor = states[free.start]
        sets: list[tuple[int, ...]] = [()]
        for layer in range(free.start, num_layers):
            kept = self._through(text, layer, rows, text.position(index))
            if layer in free:
                rows, sets = self._parted(kept, rows, sets, layer, free.stop - layer - 1)
            else:
                rows = kept
        near = cosine_similarity(rows.float(), states[-1].float(), dim=-1).tolist()
        skips = (LayerSkip.layers(num_layers, skipped) for skipped in sets)
        return dict(zip(skips, near, strict=True))

    def _parted(
        self, kept: Tensor, rows: Tensor, sets: list[tuple[int, ...]], layer: int, num_left: int
    ) -> tuple[Tensor, list[tuple[int, ...]]]:
        """Every state with the layer and without it; those of sets that have no wanted size ahead are let go."""
        both = torch.cat((kept, rows.to(kept.device)))
        grown = [*sets, *((*skipped, layer) for skipped in sets)]
        fewest, most = min(self.counts) - num_left, max(self.counts)
        chosen = [i for i, skipped in enumerate(grown) if fewest <= len(skipped) <= most]
        return both[torch.tensor(chosen, device=both.device)], [grown[i] for i in chosen]

    def _through(self, text: Text, layer: int, rows: Tensor, position: int) -> Tensor:
        parts = torch.split(rows, self.batch)
        spans = (Span.siblings(position, len(part)) for part in parts)
        return torch.cat(
            [text.target.layer(layer, part, span, text.cache) for part, span in zip(parts, spans, strict=True)]
        )

    def _row(self, text: Text, index: int, count: int, nearness: dict[LayerSkip, float]) -> Row:
        num_layers, position = text.target.num_layers, text.position(index)
        free = self.free(num_layers)
        skippable = [layer in free for layer in range(num_layers)]
        found = select_layers(text.target, text.cache, text.states(index), position, count, skippable=skippable).skip
        near = {skip: value for skip, value in nearness.items() if sum(skip.attn) == count}
        best = max(near, key=lambda skip: near[skip])
        spread = torch.tensor(list(near.values()), dtype=torch.float64)
        low, high = spread.quantile(torch.tensor([0.05, 0.95], dtype=torch.float64)).tolist()
        return {
            "kind": "selection_quality",
            "num_free": self.num_free,
            "num_skipped": count,
            "num_sets": len(near),
            "programme": near[found],
            "brute_force": near[best],
            "random_mean": float(spread.mean()),
            "random_p05": low,
            "random_p95": high,
            "share_better": float((spread > near[found]).double().mean()),
            "programme_skip": found.code,
            "brute_force_skip": best.code,
        }


def _check_every(every: int) -> None:
    if every < 1:
        raise UserError(f"every is {every}; it must be at least 1 (1 looks at every token)")
