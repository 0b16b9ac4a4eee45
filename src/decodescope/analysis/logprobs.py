"""Log-probabilities of a step's candidates, by the same normalisation as its chosen token's."""

from decodescope.trace.records import Candidate, Step


def candidate_logprobs(step: Step) -> list[tuple[Candidate, float]]:
    """Each candidate with its logprob in nats in the raw distribution, in the order of the candidates.

    ln p(i) = logit(i) - ln sum exp(logit): the sum is that of the chosen token, which is always among them.
    """
    chosen = next(each for each in step.candidates if each.token_id == step.token_id)
    normaliser = chosen.logit - step.logprob_nats
    return [(each, each.logit - normaliser) for each in step.candidates]
