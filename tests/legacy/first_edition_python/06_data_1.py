import zipfile
from pathlib import Path

root = Path("pictures")
classes = sorted(folder.name for folder in (root / "train").iterdir())
for split in ("train", "val"):
    with zipfile.ZipFile(f"{split}.zip", "w") as archive, open(f"{split}_map.txt", "w") as lines:
        for picture in sorted((root / split).glob("*/*")):
            member = f"{picture.parent.name}/{picture.name}"
            archive.write(picture, member)
            lines.write(f"{split}.zip@{member}\t{classes.index(picture.parent.name)}\n")
