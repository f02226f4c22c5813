"""Detection data: COCO annotations, datasets, transforms, batches."""
