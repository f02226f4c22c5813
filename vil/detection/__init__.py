"""Detection: boxes and masks of objects, learnt through the loop that classifiers use.

annotations  a file in COCO's format -> columns; what cannot be used is dropped, with a reason
masks        polygons and run lengths -> bitmaps
coco         CocoDataset, and DETECTION_SETS: the sets by name
transforms   what a training picture goes through, boxes and masks with it
batch        DetectionBatch: pictures of any sizes and their targets
"""
