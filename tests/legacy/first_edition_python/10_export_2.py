import json
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("small.onnx", providers=["CPUExecutionProvider"])
notes = session.get_modelmeta().custom_metadata_map      # of a file of `vil export`: mean, std, classes and more
mean, std = (np.array(json.loads(notes.get(key, default)), dtype=np.float32)[:, None, None]
             for key, default in (("mean", "[0.485, 0.456, 0.406]"), ("std", "[0.229, 0.224, 0.225]")))
picture = np.random.rand(3, 64, 64).astype(np.float32)   # 0 to 1
logits = session.run(["logits"], {"images": ((picture - mean) / std)[None]})[0]
classes = json.loads(notes.get("classes", "[]"))
print(classes[logits.argmax()] if classes else logits.argmax())
