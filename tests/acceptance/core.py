"""The points of the core: exactness on real questions, planted layers, speed of the reference, the null method."""

from __future__ import annotations

from collections import Counter
from functools import partial
from statistics import median

import torch

from baselines.hf_generate import HFGenerate
from clasp_core.attention import Span
from clasp_core.clasp import clasp, select_layers
from clasp_core.divergence import divergence
from clasp_core.drafting import NoDraft
from clasp_core.metrics.losses import ladder
from clasp_core.metrics.pairing import pairs
from clasp_core.metrics.speedups import paired_total
from clasp_core.plan import Method
from clasp_core.prompting import Prompter
from clasp_core.records import TurnRecord
from clasp_core.target import forward
from tests.acceptance.bench import Point, load, measure, over_generate, sample, spec_bench


def clasp_is_exact(model_name: str) -> Point:
    """Greedy float32 ids of CLaSp and of `generate` equal AR's; a tie that float64 confirms is allowed, counted."""
    model = load(model_name)
    num_layers = model.target.num_layers
    counts = (1, num_layers // 4, num_layers // 2, 3 * num_layers // 4)
    methods: dict[str, Method] = {"ar": NoDraft(), "hf_generate": HFGenerate()}
    methods |= {f"clasp-{m}": clasp(m, None, 16, 0.7, 12) for m in counts}
    rows = measure(model, methods, spec_bench(8), 64)
    ar = {row.pair: row for row in rows if row.method == "ar"}
    verdicts: Counter[str] = Counter("failed" if row.error else "equal" for row in rows if row.method != "ar")
    parted = [row for row in rows if row.first_divergence is not None]
    if parted:
        wide = load(model_name, dtype="float64")
        for row in parted:
            verdicts["equal"] -= 1
            verdicts["tie" if _tie_in_float64(wide, row, ar[row.pair]) else "wrong"] += 1
    holds = not verdicts["failed"] and not verdicts["wrong"]
    drafted = sum(sum(row.rounds.num_drafted) for row in rows if row.rounds)
    return Point(holds, f"{dict(verdicts)} of {len(ar)} turns x {len(methods) - 1} methods, {drafted} tokens drafted")


def _tie_in_float64(model, row: TurnRecord, reference: TurnRecord) -> bool:  # type: ignore[no-untyped-def]
    """Whether the two tokens' exact logits are closer than float32 can tell on this model."""
    question = next(q for q in spec_bench(8) if q.question_id == row.question_id)
    prompter = Prompter(model.tokenizer, model.prompt)
    answers = [prompter.text_of(reference.output_ids or [])] * row.turn
    ids = prompter.ids(question.turns[: row.turn + 1], answers)
    found = divergence(model.target, ids, reference.output_ids or [], row.output_ids or [])
    return found is not None and found.gap is not None and found.gap <= (row.divergence_bound or 0)


@torch.inference_mode()
def planted_layers_are_found() -> Point:
    """With 30 of 60 layers skipped, at least 27 of the 30 planted ones, on 20 Spec-Bench prompts."""
    model = load("smollm2-135m-deep")
    target, prompter = model.target, Prompter(model.tokenizer, model.prompt)
    planted = set(model.info["planted_layers"])
    prompts = [prompter.ids(q.turns[:1], []) for q in spec_bench(4)][:20]
    found = []
    for ids in prompts:
        cache = target.new_cache(len(ids))
        tokens = torch.tensor(ids)
        out = forward(target, tokens, Span.causal(0, len(ids)), cache, rows=slice(-1, None), keep_hidden=True)
        assert out.hidden is not None
        chosen = select_layers(target, cache, list(out.hidden), len(ids) - 1, len(planted))
        found.append(len(planted & set(chosen.skip.skipped_attn)))
    return Point(min(found) >= 27, f"{min(found)} to {max(found)} of {len(planted)} on {len(found)} prompts, need 27")


def ar_is_as_fast_as_generate() -> Point:
    """Tokens/s of this engine's AR over those of Hugging Face's `generate`: median of interleaved ratios."""
    ratios = over_generate()
    return Point(median(ratios) >= 1, f"{median(ratios):.3f} (from {min(ratios):.3f} to {max(ratios):.3f}), need 1")


def null_method_is_one_and_ladder_closes() -> Point:
    """AR against AR is 1.00 inside its interval; the ladder's product equals the measured speed-up."""
    methods: dict[str, Method] = {"ar": NoDraft(), "ar_again": NoDraft(), "clasp": clasp(30, None, 128, 0.7, 12)}
    rows = measure(load("smollm2-135m-deep"), methods, sample(2), 48)
    by_name = {name: [row for row in rows if row.method == name] for name in methods}
    null = paired_total(pairs(by_name["ar"], by_name["ar_again"]).pairs, greedy=True)
    steps = ladder(pairs(by_name["ar"], by_name["clasp"]).pairs, greedy=True, c_bytes=0.5)
    assert null is not None
    assert null.low is not None
    assert null.high is not None
    assert steps is not None
    assert steps.ceiling is not None
    product = steps.ceiling
    for step in steps.steps.values():
        product *= step if step is not None else 1.0
    gap = abs(product / steps.measured - 1)
    return Point(
        null.low <= 1 <= null.high and gap < 1e-6,
        f"AR again {null.value:.3f} [{null.low:.3f}, {null.high:.3f}]; ladder's product off by {gap:.1e}",
    )


POINTS = {
    "exact-smollm2-135m": partial(clasp_is_exact, "smollm2-135m"),
    "exact-smollm2-135m-deep": partial(clasp_is_exact, "smollm2-135m-deep"),
    "planted": planted_layers_are_found,
    "ar-over-generate": ar_is_as_fast_as_generate,
    "null-and-ladder": null_method_is_one_and_ladder_closes,
}
