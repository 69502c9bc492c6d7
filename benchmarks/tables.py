"""The tables of docs/figures.md, from the stored results of the benchmarks."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks.tables_of_hosts import (
    costs,
    encryption,
    floods,
    head,
    hosts,
    machines,
    on_ray,
    on_spark,
    ratio,
    shared_memory,
)
from benchmarks.tables_of_layouts import factorise, hybrid, pipeline

Record = Mapping[str, Any]


def server(record: Record) -> Iterator[str]:
    """Yield the server's share of a bare connection's throughput, and the round trip of 4 KB."""
    yield from head(f"Push and pull of {record['bytes'] / 1e6:.0f} MB over loopback, apply included", "server")
    yield "| side | GB/s | share of the bare pair one way | share of the bare pair both ways | wanted |"
    yield "| --- | --- | --- | --- | --- |"
    for name, speed in record["bare"].items():
        yield f"| {name} | {speed['median']:.2f} | | | |"
    for name, one in record["ways"].items():
        asked = f"at least {record['wanted']:g} of one way" if name.startswith("plain") else ""
        shares = f"{ratio(one['of_one_way'])} | {ratio(one['of_both_ways'])}"
        yield f"| {name} | {one['gb_per_s']['median']:.2f} | {shares} | {asked} |"
    times = ", ".join(f"{name} {one['median']:.3f} ms" for name, one in record["round_trip_ms"].items())
    yield ""
    wanted = f"wanted at most {record['wanted_ms']:g} ms"
    yield f"Rows of Stretto count both directions. Round trip of 4 KB: {times}; {wanted}."


def updates(record: Record) -> Iterator[str]:
    """Yield updates per second by workers, shards and encryption."""
    about = f"Updates applied per second, {record['parameters'] / 1e6:g} M parameters, workers that only push"
    yield from head(about, "updates")
    workers = sorted({case["workers"] for case in record["cases"]})
    yield f"| server | {' | '.join(_several(number, 'worker') for number in workers)} |"
    yield "| --- |" + " --- |" * len(workers)
    found = {(one["curve"], one["shards"], one["workers"]): one["updates_per_s"]["median"] for one in record["cases"]}
    for curve, shards in sorted({(curve, shards) for curve, shards, _ in found}):
        speeds = [f"{found[curve, shards, number]:.0f}" for number in workers]
        yield f"| {'CURVE' if curve else 'plain'}, {_several(shards, 'shard')} | {' | '.join(speeds)} |"


def rows(record: Record) -> Iterator[str]:
    """Yield the bytes and the steps of a table with sparse and with dense gradients."""
    yield from head(f"A step of `async_sgd`: {record['question'].removeprefix('bytes and time of a step of ')}", "rows")
    yield "| gradients | bytes sent a step | bytes received a step | steps per second, 2 workers |"
    yield "| --- | --- | --- | --- |"
    for kind in ("sparse", "dense"):
        one = {name: spread["median"] for name, spread in record[kind].items()}
        yield f"| {kind} | {one['sent']:,.0f} | {one['received']:,.0f} | {one['steps_per_s']:.1f} |"


def peers(record: Record) -> Iterator[str]:
    """Yield our server's updates per second beside those of other servers."""
    yield from head("The parameter server against others, workers that only push", "peers")
    yield f"| model | workers | side | updates/s | GB/s both ways | updates/s of {record['sides'][0]} / of it |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for case in record["cases"]:
        for name, one in case["sides"].items():
            load = f"{case['parameters'] / 1e6:g} M | {case['workers']} | {name}"
            speeds = f"{one['updates_per_s']['median']:.4g} | {one['gb_per_s']:.2f}"
            yield f"| {load} | {speeds} | {'' if name == record['sides'][0] else ratio(one['ratio'])} |"
    yield ""
    yield "torch rpc and Ray use shared memory on one machine; rows with TCP use TCP, as Stretto does."


def overlap(record: Record) -> Iterator[str]:
    """Yield what overlapping exchange and computation gains, and what it costs."""
    yield from head(record["question"][0].upper() + record["question"][1:], "overlap")
    yield "| loopback | with / without | recipe | samples/s | mean staleness | test accuracy |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for name, case in record["cases"].items():
        for recipe, one in case["sides"].items():
            shown = ratio(case["ratio"]) if "overlap" in recipe else ""
            numbers = f"{one['samples_per_s']['median']:.0f} | {one['staleness']:.2f} | {one['accuracy']:.3f}"
            yield f"| {name} | {shown} | {recipe} | {numbers} |"
    yield ""
    yield f"`{record['script']}`; medians over {record['starts']} runs each."


def unequal(record: Record) -> Iterator[str]:
    """Yield what a slow worker costs each recipe."""
    (slow, times), *_ = record["slow"].items()
    yield from head(f"{record['workers']} workers, worker {slow} computes {times:g} times slower", "unequal")
    yield "| example | recipe | samples/s | ratio to the barrier's | wanted | seconds to the target | staleness |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for name, case in record["cases"].items():
        for recipe, one in case["recipes"].items():
            shown = ratio(one["ratio"]) if one["ratio"] and recipe != record["against"] else ""
            asked = f"at least {record['wanted']:g}" if recipe in record["wanted_of"] else ""
            example = f"{name}, {case['target']:.0%} | {recipe}"
            numbers = f"{_number(one['samples_per_s'], 0)} | {shown} | {asked}"
            yield f"| {example} | {numbers} | {_to_target(one)} | {_number(one['staleness'], 1)} |"
    yield ""
    yield from _stretch_factors(record)


def _stretch_factors(record: Record) -> Iterator[str]:
    factors = "; ".join(f"{name}: `--stragglers {case['slow']}`" for name, case in record["cases"].items())
    cores = record["machine"]["cores"]
    yield f"{factors}. Without further stretching {record['workers']} workers compute on {cores} cores, which limits"
    yield "the gain; stretched as on 4 machines, all sleep most of the time. A staleness bound makes fast workers wait."


def kernels(record: Record) -> Iterator[str]:
    """Yield the throughput of each kernel, beside a copy of memory and the same operation in torch."""
    yield from head(
        f"GB/s of gradient through each native kernel, one thread, {record['numbers']:,} numbers", "kernels"
    )
    yield "| kernel | with the residual | without | memcpy | torch | share of memcpy | wanted | times torch | wanted |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for name, one in record["cases"].items():
        sides = ("with residual", "without", "memcpy", "torch")
        speeds = " | ".join(f"{one['gb_per_s'][side]['median']:.2f}" for side in sides)
        asked = f"at least {one['wanted']:g}" if one["wanted"] else ""
        times = f"{ratio(one['times_torch'])} | " + (f"at least {record['times_torch_wanted']:g}" if asked else "")
        yield f"| {name} | {speeds} | {ratio(one['of_memcpy'])} | {asked} | {times} |"
    yield ""
    yield "Shares and times are those of the pass with the residual, which reads two vectors and writes one."


def fewer(record: Record) -> Iterator[str]:
    """Yield time and bytes to an accuracy behind slow links: DDP with its hooks beside our codecs."""
    link = f"{record['hosts']} hosts at {record['link_mbit']:g} Mbit/s"
    yield from head(f"Seconds and bytes to {record['target']:.1%} of MNIST's test images, {link}", "fewer")
    yield from _way_rows(record)
    if record.get("best"):
        one = record["best"]
        yield ""
        yield (
            f"The fastest recipe, {one['ours']}, is {one['speed']:.2f} times as fast as the fastest hook of DDP, "
            f"{one['theirs']}; wanted at least {record['wanted']:g}. {_computing_bound(record)}"
        )


def _computing_bound(record: Record) -> str:
    """Return the lower bound of a step's time on this machine."""
    cores, hosts, step_ms = record["machine"]["cores"], record["hosts"], record["ms_a_step"].get("alone")
    if step_ms is None or cores >= hosts:
        return ""
    return f"{hosts} hosts share {cores} cores: computing takes at least {step_ms * hosts / cores:.1f} ms a step."


def shakespeare(record: Record) -> Iterator[str]:
    """Yield time, steps and bytes to the loss of allreduce."""
    link = f"{record['hosts']} hosts at {record['link_mbit']:g} Mbit/s"
    target = f"a held-out loss of {record['target']:.3f}, that of one epoch of allreduce"
    yield from head(f"Shakespeare, {link}: seconds and bytes to {target}", "shakespeare")
    yield from _way_rows(record)


def _way_rows(record: Record) -> Iterator[str]:
    yield "| way | recipe | optimizer | seconds | steps | ms a step | MB sent a host |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for way, seconds in record["seconds_to_target"].items():
        recipe = record["recipes"].get(way)
        shown = f"`{recipe}`" if recipe else ""
        took = f"{seconds:.1f}" if seconds else "not reached"
        numbers = f"{record['steps'][way]:.0f} | {record['ms_a_step'][way]:.1f} | {record['megabytes_a_host'][way]:.1f}"
        yield f"| {way} | {shown} | {record['optimizers'][way]} | {took} | {numbers} |"


def convex(record: Record) -> Iterator[str]:
    """Yield rounds and uplink bits of the methods on convex problems, beside those of an independent program."""
    yield from head("GD-SEC and others on logistic regression: rounds and uplink bits to the target", "convex")
    independent = "independent program: rounds | saved"
    yield f"| data, workers, F - F* | method | rounds | uplink bits | saved | {independent} | wanted |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for name, case in record["cases"].items():
        for one in case["methods"]:
            load = f"{name}, first {case['rows']}, {case['workers']}, {case['target']:g} | {one['method']}"
            rounds = f"{one['rounds']}" + ("" if one["reached"] else ", not reached")
            saved = "" if one["saved"] is None else f"{one['saved']:.2%}"
            factors = f"{one['field_rounds'] or ''} | " + (f"{one['field_saved']:.2%}" if one["field_saved"] else "")
            asked = f"at least {case['wanted']:.1%}" if one["method"] == case["wanted_of"] else ""
            yield f"| {load} | {rounds} | {one['uplink_bits']} | {saved} | {factors} | {asked} |"
    yield ""
    yield f"A method ends after {record['late']} times the rounds of gd. xi in units of L, l2 = {record['l2']:g}."


def simulated(record: Record) -> Iterator[str]:
    """Yield the simulator's predictions beside the laboratory's measurements."""
    about = (
        f"Predicted by `stretto simulate` and measured: {record['hosts']} hosts, which share the cores of one machine"
    )
    yield from head(about, "simulated")
    yield "| case | Mbit/s | ms a step predicted | measured | ratio | bytes predicted / sent | predicted / received |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for case in record["cases"]:
        sides = (
            statistics.median(run[side]["ms_a_step"] for run in case["runs"]) for side in ("simulated", "measured")
        )
        numbers = " | ".join(f"{one:.2f}" for one in sides)
        name = f"{case['script']}, {case['recipe']} | {case['link_mbit']:g}"
        moved = f"{case['bytes_ratio']:.4f} | {case['received_ratio']:.4f}"
        yield f"| {name} | {numbers} | {case['time_ratio']:.2f} | {moved} |"

    def count_good(kind: str, wanted: float) -> int:
        return sum(abs(case[kind] - 1) <= wanted for case in record["cases"])

    wanted = record["wanted_bytes"]
    yield ""
    yield (
        f"Time within {record['wanted']:.0%} in {count_good('time_ratio', record['wanted'])} of {len(record['cases'])} "
        f"cases; bytes within {wanted:.0%} of those sent in {count_good('bytes_ratio', wanted)}, "
        f"of those received in {count_good('received_ratio', wanted)}: retransmissions are received once."
    )


def simulator(record: Record) -> Iterator[str]:
    """Yield the simulator's speed and memory."""
    about = f"{record['workers']} simulated workers of a perceptron of 5 K parameters, one by one on one core"
    yield from head(about, "simulator")
    yield "| recipe | worker steps/s | plain loop, steps/s | ratio | wanted |"
    yield "| --- | --- | --- | --- | --- |"
    for name, case in record["cases"].items():
        speeds = " | ".join(f"{case['steps_a_second'][side]:.0f}" for side in ("simulated", "plain"))
        yield f"| {name} | {speeds} | {ratio(case['ratio'])} | at least {record['wanted_steps']:.0f} steps/s |"
    memory, rounds = record["memory"], record["rounds"]
    yield ""
    yield (
        f"{memory['workers']} workers: {memory['mib']:.0f} MiB at the peak, wanted at most {record['wanted_mib']:.0f}; "
        f"{memory['kib_a_worker']:.0f} KiB a worker. Where one fails and rejoins: {memory['mortal_mib']:.0f} MiB."
    )
    theirs = f", in Flower's simulation engine {rounds['flower']:.3f} s" if "flower" in rounds else ""
    about = f"A round of {record['workers']} clients with {record['every']} steps each"
    yield f"{about}: {rounds['stretto']:.3f} s{theirs}."


def recovery(record: Record) -> Iterator[str]:
    """Yield how long a failure stops the other workers, beside a restart of all."""
    about = f"Seconds from the failure of one of {record['workers']} workers to the next round that the others commit"
    yield from head(about, "recovery")
    yield "| model | worker | side | median s | quartiles | worst | deaths | ms a step | wanted |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for model, case in record["cases"].items():
        for victim, sides in case["victims"].items():
            for name, one in sides.items():
                asked = f"at most {record['wanted_s']:g}" if name == "stretto" else ""
                yield f"| {model} | {victim} killed | {name} | {costs(one)} | {case['step_ms'][name]:.1f} | {asked} |"
    paused = record["vanished"]
    timeout = f"{paused['failure_timeout_s']:g}"
    yield (
        f"| {paused['model']} | {paused['victim']} paused | stretto, `--failure-timeout {timeout}s` | "
        f"{costs(paused)} | | at most {timeout} |"
    )
    layouts = record["layouts"]
    for name, one in layouts["sides"].items():
        ms, asked = 1000 * statistics.median(layouts["step_s"][name]), f"at most {layouts['wanted_s']:g}"
        victim = f"{layouts['model']} | one of {layouts['workers']} killed"
        yield f"| {victim} | {name} | {costs(one)} | {ms:.1f} | {asked} |"
    yield ""
    yield (
        "torchrun restarts all processes from the beginning: its script writes and reads no checkpoint. "
        f"{record['workers']} workers share {record['machine']['cores']} cores."
    )


def upkeep(record: Record) -> Iterator[str]:
    """Yield what fault tolerance and checkpoints cost."""
    about = f"Steps per second with recovery from failures against without, {record['workers']} workers"
    yield from head(about, "upkeep")
    yield "| model | recipe | in the same processes | ready, ready | by processor | ready, ready | wanted |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for one in record["aside"]:
        names = ("ratio", "ratio_of_the_same", "processor_ratio", "processor_ratio_of_the_same")
        ratios = " | ".join(ratio(one[name]) for name in names)
        clipped = ", gradients clipped" * one["clips"]
        yield f"| {one['case']} | {one['recipe']}{clipped} | {ratios} | at least {record['wanted']:g} |"
    yield ""
    yield "Between two runs, which differ by up to a tenth even if both are of one kind:"
    yield ""
    yield "| model | recipe | ratio | wanted | by processor | ready, steps/s | not ready, steps/s |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for one in record["cases"]:
        speeds = " | ".join(f"{speed:.1f}" for speed in one["steps_a_second"].values())
        ratios = f"{ratio(one['ratio'])} | at least {record['wanted']:g} | {ratio(one['processor_ratio'])}"
        yield f"| {one['case']} | {one['recipe']} | {ratios} | {speeds} |"
    yield ""
    yield f"All {sum(one['starts'] for one in record['cases'])} pairs of runs together: {ratio(record['together'])}."
    yield ""
    yield f"| model | recipe | checkpoints | seconds that one costs | share, one every {record['asked_s']} s | wanted |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for one in record["checkpoints"]:
        seconds = {"median": one["s_a_checkpoint"], "standard_error": one["error_s"]}
        each = f"{ratio(seconds)} | {one['share']:.1%}" if one["checkpoints"] else "none was written |"
        costs = f"{one['checkpoints']} | {each}"
        yield f"| {one['case']} | {one['recipe']} | {costs} | at most {record['wanted_share']:.0%} |"
    yield ""
    yield (
        f"Checkpoints were written every {record['every_s']} s; the share is what one costs, of {record['asked_s']} s. "
        f"{record['workers']} workers on {record['machine']['cores']} cores."
    )


def last_model(record: Record) -> Iterator[str]:
    """Yield what the newest model costs that is kept at the end of each epoch."""
    yield from head(
        f"Epochs per second with the last model kept against without, {record['workers']} workers", "last_model"
    )
    yield "| model | recipe | ratio | wanted | seconds of an epoch |"
    yield "| --- | --- | --- | --- | --- |"
    for one in record["cases"]:
        asked = f"at least {record['wanted']:g}"
        yield f"| {one['case']} | {one['recipe']} | {ratio(one['ratio'])} | {asked} | {one['epoch_s']:.2f} |"


def soak(record: Record) -> Iterator[str]:
    """Yield the results of long runs with faults for each recipe."""
    about = f"{record['minutes']:g} minutes of kills and pauses, one every {record['every_s']:g} s in the mean"
    yield from head(about, "soak")
    yield "| run | recipe | completed | rounds | struck | deaths | samples once | twice | never | done again |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for one in record["runs"]:
        seen, whole = one["seen"], "yes" if one["completed"] else f"no: {one['why']}"
        struck = f"{one['rounds']} | {one['struck']} | {sum(one['deaths'].values())}"
        counts = " | ".join(str(seen[name]) for name in ("once", "twice", "never", "recovered_samples"))
        yield f"| {one['run']} | {one['recipe']} | {whole} | {struck} | {counts} |"
    yield ""
    yield "| run | accuracy | undisturbed | longest life, s | MB at its beginning | at its end | most |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for one in record["runs"]:
        memory = one["memory"]
        sizes = [memory["life_s"], *(memory[name] for name in ("early_mb", "late_mb", "most_mb"))] if memory else []
        numbers = " | ".join(_number(number, 0) for number in sizes) if memory else "| | |"
        found = f"{_number(one['accuracy'], 3)} | {_number(one['undisturbed'], 3)}"
        yield f"| {one['run']} | {found} | {numbers} |"
    good = sum(one["completed"] for one in record["runs"])
    lost = sum(one["seen"]["never"] + one["seen"]["twice"] for one in record["runs"])
    yield ""
    yield (
        f"{good} of {len(record['runs'])} runs completed, {lost} samples lost or counted twice. Samples done again are "
        "those of an earlier epoch whose work was lost with a worker."
    )


def survival(record: Record) -> Iterator[str]:
    """Yield how many phases and signals each recipe survived, for each failing process."""
    asked = "does the run complete with the same result?"
    about = f"Kills, pauses and SIGTERM in each phase: {asked} {record['workers']} workers"
    yield from head(about, "survival")
    seeds = len(next(iter(record["undisturbed"].values())))
    yield "Survived is a run that ends with exit code 0, in which each sample of each epoch counted once, whose"
    yield f"replicas are equal where the recipe says so, and whose accuracy is at most {100 * record['worse']:g} point"
    yield f"lower than that of the undisturbed runs with {seeds} seeds."
    yield ""
    yield "| recipe | who | survived | what did not |"
    yield "| --- | --- | --- | --- |"
    taken = record["cases"]
    for recipe, who in sorted({(one["recipe"], one["who"]) for one in taken}):
        mine = [one for one in taken if (one["recipe"], one["who"]) == (recipe, who)]
        failed = [f"{one['phase']}, SIG{one['signal']}" for one in mine if not one["survived"]]
        yield f"| {recipe} | {who} | {len(mine) - len(failed)} of {len(mine)} | {'; '.join(failed)} |"


def hunt(record: Record) -> Iterator[str]:
    """Yield the numbers of random runs and faults, and the findings."""
    command = f"hunt --seeds 0..{record['seeds'] - 1}"
    yield from head("Random runs with random faults, judged by a model that counts", command)
    yield "| seeds | recipes | faults | seeds with findings |"
    yield "| --- | --- | --- | --- |"
    recipes, number = len(record["by_recipe"]), sum(record["faults"].values())
    yield f"| {record['seeds']} | {recipes} | {number} | {len(record['wrong'])} |"
    yield ""
    faults = ", ".join(f"{name} {count}" for name, count in record["faults"].items())
    yield f"Faults: {faults}. Each seed counts with its last run; what earlier runs have found is in the [log](log.md)."
    for seed, findings in record["wrong"].items():
        yield f"- seed {seed}: {'; '.join(findings)}"


TABLES: Mapping[str, Callable[[Record], Iterator[str]]] = {
    "survival": survival,
    "hunt": hunt,
    "convex": convex,
    "kernels": kernels,
    "shared_memory": shared_memory,
    "hosts": hosts,
    "encryption": encryption,
    "machines": machines,
    "floods": floods,
    "pipeline": pipeline,
    "hybrid": hybrid,
    "factorise": factorise,
    "server": server,
    "updates": updates,
    "rows": rows,
    "peers": peers,
    "overlap": overlap,
    "unequal": unequal,
    "fewer": fewer,
    "shakespeare": shakespeare,
    "simulated": simulated,
    "simulator": simulator,
    "recovery": recovery,
    "spark": on_spark,
    "ray": on_ray,
    "upkeep": upkeep,
    "last_model": last_model,
    "soak": soak,
}


def _several(number: int, thing: str) -> str:
    return f"{number} {thing}" + ("s" if number > 1 else "")


def _to_target(one: Record) -> str:
    if one["seconds_to_target"] is None:
        return f"reached in {one['reached']} of {one['runs']} runs"
    return f"{one['seconds_to_target']:.1f}"


def _number(number: float | None, digits: int) -> str:
    return "" if number is None else f"{number:.{digits}f}"
