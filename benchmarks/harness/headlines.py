"""What each benchmark answers, in a sentence or two whose figures are read from its record."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.harness.record import Record


@dataclass(frozen=True)
class Headline:
    """A question, and its answer from the benchmark's record."""

    question: str
    answer: Callable[[Record], str]


def noted(record: Record, pattern: str) -> tuple[str, ...]:
    """Return the groups of the first match of a pattern in a record's notes."""
    matches = (re.search(pattern, note) for note in record.notes)
    return next(match.groups() for match in matches if match)


def cells(record: Record, column: str, **where: str) -> list[str]:
    """Return a column's cells, without empty ones, in the rows whose other columns are as in `where`."""
    rows = [dict(zip(record.columns, row, strict=True)) for row in record.rows]
    return [row[column] for row in rows if row[column] and all(row[name] == value for name, value in where.items())]


def span(record: Record, column: str, **where: str) -> str:
    """Return the smallest and the largest number of a column as "least to most"."""
    numbers = sorted(cells(record, column, **where), key=lambda cell: float(cell.rstrip("%")))
    return numbers[0] if numbers[0] == numbers[-1] else f"{numbers[0]} to {numbers[-1]}"


def _attention(record: Record) -> str:
    times = r"(\S+) tokens, forward \+ backward: geometric mean (\S+) of yunchang .* and (\S+) of one process"
    matches = [match.groups() for note in record.notes if (match := re.search(times, note))]
    (short, ours, single), (long, ours_long, single_long) = matches
    sent, theirs = noted(record, r"Ring of 4, zigzag: (\S+) units sent per rank, yunchang (\S+)\.")
    equal, cases = noted(record, r"in (\d+) of (\d+) cases")
    return (
        f"A forward and backward pass on 4 ranks takes {ours} of yunchang's time at {short} tokens and {ours_long} at "
        f"{long}, and {single} and {single_long} of one process's on the same cores. A ring of 4 sends {sent} times "
        f"the activations of a sequence per rank, yunchang's {theirs}. Bytes on the wire equal the predicted ones in "
        f"{equal} of {cases} cases."
    )


def _throughput(record: Record) -> str:
    ours = [row for row in record.rows if row[1].startswith("ours")]
    plain, alst = (sorted(row[column] for row in ours) for column in (4, 5))
    lengths = {row["seq_len"]: row["loss"] for row in record.data}
    apart = max(abs(row["loss"] / lengths[row["seq_len"]] - 1) for row in record.data)
    return (
        f"Tokens per second on 4 ranks under ZeRO-3 are {plain[0]} to {plain[-1]} of transformers with FSDP2, and "
        f"{alst[0]} to {alst[-1]} of DeepSpeed's ALST. Losses differ by at most {apart:.0e}."
    )


def _memory(record: Record) -> str:
    fits = r"transformers \+ FSDP2 \({}\) fits (\S+) tokens, ours at least (\S+): (\d+) x"
    plain, ours, times = noted(record, fits.format("plain"))
    _, saving, saving_times = noted(record, fits.format("plain, checkpointing"))
    part, ranks = noted(record, r"4 x 2, 16,384 .*, (\S+) of one rank's / (\d+)")
    return (
        f"Where transformers with FSDP2 fits a sequence of {plain} tokens on each of {ranks} ranks, one of at least "
        f"{ours} over all ranks fits, {times} times as long; {saving} and {saving_times} times with recomputation in "
        f"both. Activations per token and rank are {part} of one rank's / {ranks}."
    )


def _faults(record: Record) -> str:
    seconds = noted(record, r"next new step: median (\S+) s")[0]
    (same,), (readings,) = noted(record, r"ranks: (.*)\.$"), noted(record, r"(\d+) readings, none failed")
    return (
        f"After {len(record.rows)} kills of a random rank (kill -9), losses and final weights are {same} to those of "
        f"an undisturbed run. Training goes on after {seconds} s (median). None of {readings} readings of checkpoints "
        "failed."
    )


def _token_store(record: Record) -> str:
    value = {row[0]: row[1] for row in record.rows}
    return (
        f"Text is tokenized at {value['tokenize / tokenizers alone']} times the rate of the `tokenizers` package "
        f"in memory; a step waits {value['waiting for data, of a step']} of its time for data. If the writer is killed "
        f"and started again, the store's files are {value['killed after 62%: files']}."
    )


def _planner(record: Record) -> str:
    mixtures, mean, worst = noted(record, r"over (\d+) mixtures: (\S+), worst (\S+)\.$")
    times = noted(record, r"takes (\S+)x the time of the measured fastest")[0]
    return (
        f"On two calibrated CPU hosts, steps of {mixtures} combinations of degrees are predicted within {mean} on "
        f"average and {worst} at worst. The predicted fastest takes {times} times the measured fastest."
    )


def _published(record: Record) -> str:
    found = [groups for note in record.notes if (groups := re.match(r"([^:]+): mean absolute error ([^,]+), ", note))]
    (_, mean), (_, recent), *sources = (match.groups() for match in found)
    by_source = ", ".join(f"{name.split(',')[0]} {error}" for name, error in sources)
    return (
        f"{sum(row['timed'] for row in record.data)} measurements that others published are predicted within {mean} on "
        f"average, those from 2024 on within {recent} ({by_source})."
    )


def _paper_tables(record: Record) -> str:
    tables = zip(cells(record, "table"), cells(record, "error, predicted rows"), strict=True)
    errors = ", ".join(f"{table} {error}" for table, error in tables)
    return f"Mean errors, with five constants fitted on a third of the rows and the rest predicted: {errors}."


def _footprint(record: Record) -> str:
    cases, mean, worst = noted(record, r"over (\d+) cases: (\S+), worst (\S+) \(")
    return f"{mean} on average and {worst} at worst over {cases} cases on 8 to 1,024 ranks, of models of 8B to 70B."


def _calibration(record: Record) -> str:
    told = zip(cells(record, "beyond 15%"), cells(record, "of them told"), strict=True)
    return (
        f"Times of three calibrations in a row, of one rank, differ by {cells(record, 'apart, fastest eighth')[0]} if "
        f"the fastest eighth of the turns counts, by {cells(record, 'apart, median')[0]} if the median does. Of the "
        f"times that differ by more than 15%, warnings tell {', '.join(f'{named} of {all_}' for all_, named in told)}."
    )


def _grpo_step(record: Record) -> str:
    one, two = cells(record, "ratio", phase="step")
    return f"A GRPO step takes {one} of the CPU seconds of TRL's `GRPOTrainer` on one rank, and {two} on two."


def _decode(record: Record) -> str:
    size, differing = cells(record, "M parameters", model="llama-20m")[0], sum(map(int, cells(record, "differing")))
    return (
        f"Tokens per second are {span(record, 'ratio', model='tiny')} times those of transformers with its faster "
        f"cache for a tiny model, {span(record, 'ratio', model='llama-20m')} times for one of {size}M parameters. "
        f"{differing} responses differ in a token."
    )


def _learning(record: Record) -> str:
    last = "mean of the last ten"
    return (
        f"Three seeds each. Correct answers under GRPO: {span(record, 'first score', algorithm='grpo')} in the first "
        f"step, {span(record, last, algorithm='grpo')} in the last ten of {span(record, 'steps', algorithm='grpo')}. "
        f"Scores by the reward model under PPO: {span(record, 'first score', algorithm='ppo')} in the first step, "
        f"{span(record, last, algorithm='ppo')} in the last ten of {span(record, 'steps', algorithm='ppo')}."
    )


def _tool_use(record: Record) -> str:
    first, last = (span(record, f"mean of the {part} ten") for part in ("first", "last"))
    steps, seeds = len(record.data[0]["scores"]), len(record.data)
    return (
        f"From random weights and demonstrations of which a seventh searches, {steps} steps of GRPO take the share of "
        f"right answers from {first} to {last} (means of ten steps, {seeds} seeds)."
    )


def _searched_plans(record: Record) -> str:
    regret, cells_, worst = noted(record, r"one: (\S+) on average over (\d+) cells .*, worst (\S+)\.$")
    mean, most = noted(record, r"it takes -(\S+) on average, at worst \+(\S+):")
    off = noted(record, r"differ by (\S+) \(median\)")[0]
    return (
        f"Over {cells_} cells it takes {regret} longer than the fastest measured plan on average and {worst} at worst, "
        f"and {mean} less than the best named one (at worst {most} more). Predicted seconds, from rates only, are off "
        f"by {off} in the median."
    )


def _search_quality(record: Record) -> str:
    above = span(record, "above the long search", search="short")
    plans = noted(record, r"tokens: (\S+) plans")[0]
    return f"A minute of one core ends {above} above the best of half an hour, in a space of {plans} plans."


def _fitted_rates(record: Record) -> str:
    pattern = r"(\d+) turns .* predicts (\d+) .*: (.*)\. By the calibrated file: (.*)\."
    turns, number, fitted, known = noted(record, pattern)
    return (
        f"The errors of {number} steps, in each of {turns} turns with a file of its own, median and maximum: {fitted}; "
        f"by a calibration {known}."
    )


def _estimates(record: Record) -> str:
    calls, steps, peaks = (
        noted(record, rf"(\d+) {what}: absolute error (\S+) \(median\), (\S+) \(maximum\)")
        for what in ("calls", "steps", "peaks of memory")
    )
    return (
        f"From a profile of the machine: {calls[0]} calls within {calls[1]} in the median ({calls[2]} at most), "
        f"{steps[0]} steps within {steps[1]} ({steps[2]}), {peaks[0]} peaks of memory within {peaks[1]} ({peaks[2]})."
    )


def _real_figure(record: Record) -> str:
    heuristic = r"Heuristic at {} tokens: mean absolute error (\S+), worst"
    (short,), (long,) = noted(record, heuristic.format(384)), noted(record, heuristic.format(896))
    predicted, measured = noted(record, r"weighted mean (\S+) \(measured (\S+)\)")
    off, order = noted(record, r"off by (\S+) on average, .* correlation (\S+);")
    return (
        f"Its heuristic plan is predicted within {long} at 896 tokens after a fit at 128 and 384 ({short}). The gain "
        f"of searched plans is {predicted} on average, ReaL measured {measured}; single gains are off by {off} "
        f"(Spearman {order})."
    )


def _long_rollouts(record: Record) -> str:
    least, most, none = noted(record, r"512K tokens, .*: (\S+) to (\S+) times as fast; (\d+) without")
    longest = noted(record, r"1024K tokens, .*: (\d+) without it fit nowhere")[0]
    same = noted(record, r"32K tokens, .*: (\S+ to \S+) times")[0]
    return (
        f"By prediction, a step is {same} times as fast at 32K tokens, {least} to {most} times at 512K, where {none} "
        f"more cases fit into memory only with it, as all {longest} do at 1M."
    )


def _replan(record: Record) -> str:
    ratio, losses = cells(record, "of the best fixed", plan="--replan")[0], noted(record, r"at most (\S+)\.$")[0]
    return (
        f"The run takes {ratio} of the time of the best fixed plan, searches and changes of plan included. Its losses "
        f"differ by at most {losses}."
    )


def _realloc(record: Record) -> str:
    mean, worst = noted(record, r"geometric mean (\S+), worst (\S+)\.$")
    return (
        f"{span(record, 'of the minimum')} of the bytes that ranks lack are sent, at {mean} of the bandwidth of a raw "
        f"all-to-all of the same bytes (geometric mean; worst {worst})."
    )


def _realloc_cluster(record: Record) -> str:
    mean, most = noted(record, r"share a host: (\S+) of the time of one fetch per rank .*, at most (\S+)\.$")
    return (
        f"What a host lacks crosses once ({span(record, 'of the minimum')} of these bytes). Where replicas share a "
        f"host, that takes {mean} of the time of one fetch per rank (geometric mean), at most {most}."
    )


def _host_time(record: Record) -> str:
    def microseconds(system: str, call: str) -> list[str]:
        columns = ("us forward", "us backward")
        return [cell for column in columns for cell in cells(record, column, system=system, call=call)]

    alone, sdpa = (" and ".join(microseconds(system, "ring 1")) for system in ("ours", "torch's SDPA"))
    ring, theirs = (" and ".join(microseconds(system, "ring 8")) for system in ("ours", "yunchang"))
    return (
        f"{alone} us of CPU time on one rank for forward and backward ({sdpa} us for torch's SDPA, whose kernel is "
        f"included), {ring} us in a ring of 8 ({theirs} us for yunchang)."
    )


def _balance(record: Record) -> str:
    def of(column: str, ring: str, layout: str) -> str:
        (cell,) = cells(record, column, ring=ring, layout=layout)
        return cell

    worked = [of("work, max/mean", ring, layout) for ring in ("8", "64") for layout in ("balanced", "zigzag")]
    sent = [of("sent", ring, "balanced") for ring in ("8", "64")]
    return (
        f"The busiest of 8 ranks has {worked[0]} of the mean work, and of 64 ranks {worked[2]} (zigzag {worked[1]} and "
        f"{worked[3]}), and the slowest of 8 takes {of('slowest rank', '8', 'balanced')} of zigzag's time. All ranks "
        f"together send {sent[0]} and {sent[1]} of its tokens."
    )


def _shared_prefixes(record: Record) -> str:
    tokens = noted(record, r"the ratio of tokens: (\S+)\.")[0]
    return (
        f"8 responses of 256 tokens to a prompt of 2,048 take {tokens} of the tokens, a training step "
        f"{span(record, 'step')} and log-probabilities {span(record, 'log-probabilities')} of the time on 1 to 4 ranks."
    )


SECTIONS: dict[str, dict[str, Headline]] = {
    "Attention and memory": {
        "attention": Headline("Is attention faster than yunchang's, and does it send less?", _attention),
        "attention_cluster": Headline(
            "And on two hosts with 1 Gbit/s between them?",
            lambda record: f"It takes {span(record, 'of yunchang')} of yunchang's time over four grids of 8 ranks.",
        ),
        "balance": Headline("What does the balanced layout gain on packed documents?", _balance),
        "host_time": Headline("How long does the host prepare a call?", _host_time),
        "memory": Headline("How much longer may sequences be in the same memory?", _memory),
        "throughput": Headline("Is a training step as fast as that of other systems?", _throughput),
    },
    "Running": {
        "communicators": Headline(
            "How many process groups does a run on 1,024 ranks make?",
            lambda record: (
                f"{span(record, 'communicators of a rank', ranks='1,024')} communicators on a rank, in "
                f"{span(record, 'calls of the world', ranks='1,024')} calls in which all ranks take part."
            ),
        ),
        "faults": Headline("Does a run survive the loss of a rank?", _faults),
        "token_store": Headline("Does data keep up with training?", _token_store),
        "data": Headline(
            "How much memory does reading a file of 500 MB take?",
            lambda record: f"At most {noted(record, r'growth of a rank is (.*?),')[0]} on a rank, of text or Parquet.",
        ),
    },
    "Predictions": {
        "published": Headline("How far are predictions from what others measured, with nothing fitted?", _published),
        "planner": Headline("How far are they from measured steps, and is the chosen layout the fastest?", _planner),
        "fitted_rates": Headline("Do rates that one run tells predict other configurations?", _fitted_rates),
        "paper_tables": Headline("How far are they from the USP paper's Tables 3 to 7?", _paper_tables),
        "footprint": Headline("How far is the formula for memory from a dry run of the real step?", _footprint),
        "calibration": Headline("Does calibration work beside other programs?", _calibration),
    },
    "RLHF": {
        "grpo_step": Headline("What does a GRPO step cost, beside TRL?", _grpo_step),
        "grpo_step_vllm": Headline(
            "And with vLLM in both?", lambda record: f"{' and '.join(cells(record, 'ratio', phase='step'))}."
        ),
        "shared_prefixes": Headline("What does computing a prompt once gain?", _shared_prefixes),
        "decode": Headline("Does one rank generate as fast as transformers?", _decode),
        "learning": Headline("Do policies learn?", _learning),
        "tool_use": Headline("Does a policy learn to use a tool?", _tool_use),
        "realloc": Headline("What does moving weights between layouts cost?", _realloc),
        "realloc_cluster": Headline("And between hosts?", _realloc_cluster),
        "staleness": Headline(
            "What does generating beside training gain?",
            lambda record: f"With --staleness 1, a step takes {record.rows[-1][-1]} of the time, with balanced work.",
        ),
        "long_tails": Headline(
            "And with a long tail of lengths?",
            lambda record: f"With --staleness 2 and partial rollouts, a step takes {record.rows[3][-2]} of the time.",
        ),
        "delta_updates": Headline(
            "What do updates send that send only what changed?",
            lambda record: (
                f"At a learning rate of 1e-6, {float(record.rows[0][3]):.1%} of the bytes of bfloat16 weights, at 1e-5 "
                f"{float(record.rows[1][3]):.1%}; of float32 weights nearly all change."
            ),
        ),
        "searched_plans": Headline("Is the searched plan the fastest when measured?", _searched_plans),
        "search_quality": Headline("Does a longer search find a better plan?", _search_quality),
        "estimates": Headline("How far are predicted calls and steps from measured ones?", _estimates),
        "estimates_hosts": Headline("And on two hosts?", _estimates),
        "real_figure": Headline("How far are predictions from ReaL's published steps?", _real_figure),
        "long_rollouts": Headline("What does sequence parallelism gain in PPO on long samples?", _long_rollouts),
        "replan": Headline("What does re-planning gain while responses grow?", _replan),
    },
}
