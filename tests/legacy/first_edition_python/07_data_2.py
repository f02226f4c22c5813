from base64 import b64encode
from pathlib import Path

root = Path("pictures")
classes = sorted(folder.name for folder in (root / "train").iterdir())
Path("labelmap.txt").write_text("\n".join(classes))
for split in ("train", "val"):
    Path(f"{split}.yaml").write_text(f"img: {split}.tsv\nlabelmap: labelmap.txt\n")
    with open(f"{split}.tsv", "wb") as rows:
        for picture in sorted((root / split).glob("*/*")):
            columns = [picture.name.encode(), picture.parent.name.encode()]
            rows.write(b"\t".join([*columns, b64encode(picture.read_bytes())]) + b"\n")
