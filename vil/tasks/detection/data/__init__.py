"""Detection data: COCO annotations, batches, transforms."""
