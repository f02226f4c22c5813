"""Temperature scaling of a classifier's logits (arXiv:1706.04599, section 4.2)."""

import numpy as np

from vil.utils.errors import DivergedError

MAX_TEMPERATURE = 100.0


def fit_temperature(logits: np.ndarray, targets: np.ndarray) -> float:
    """Return the temperature T that minimizes the cross entropy of softmax(logits / T).

    logits: (N, K) for N images and K classes. targets (N,): class of each image. T is at most
    MAX_TEMPERATURE, and at least its inverse. Raises DivergedError if a logit is NaN or infinite.
    """
    from scipy.optimize import minimize_scalar  # scipy is a dependency of scikit-learn
    from scipy.special import logsumexp

    logits = logits.astype(np.float64)
    if not np.isfinite(logits).all():
        raise DivergedError(
            "cannot calibrate: some outputs of the model are NaN or infinite; use another "
            "checkpoint"
        )
    correct = logits[np.arange(len(targets)), targets].mean()

    def cross_entropy(log_temperature: float) -> float:
        scale = np.exp(-log_temperature)
        return float(logsumexp(scale * logits, axis=1).mean() - scale * correct)

    limit = np.log(MAX_TEMPERATURE)
    # convex in 1 / T, so a local minimum is the global minimum
    found = minimize_scalar(cross_entropy, bounds=(-limit, limit), method="bounded")
    return float(np.exp(found.x))
