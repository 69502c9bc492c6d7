"""All experiments, in the order of the page."""

from experiments import averaging, bound, learners, links, staleness, stragglers, weighting

EXPERIMENTS = {
    one.EXPERIMENT.name: one.EXPERIMENT for one in (averaging, staleness, learners, weighting, bound, stragglers, links)
}
