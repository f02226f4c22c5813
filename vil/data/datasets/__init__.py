"""Image classification datasets, their concatenation, and image lists for prediction."""
