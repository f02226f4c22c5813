"""Weight files: reading, writing, loading into models, conversion, and published weights."""
