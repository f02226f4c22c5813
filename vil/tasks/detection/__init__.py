"""Detection: boxes and masks of objects, learnt through the loop that classifiers use.

coco_file    a file in COCO's format, or an error that says what it is instead
annotations  its columns; what cannot be used is dropped, with a reason
masks        polygons and run lengths -> bitmaps
coco         CocoDataset, and DETECTION_SETS: the sets by name
transforms   what a training picture goes through, boxes and masks with it
batch        DetectionBatch: pictures of any sizes and their targets
"""
