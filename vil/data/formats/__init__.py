"""Archives and tables that hold images: zip, tar, TSV."""
