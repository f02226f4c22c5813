"""Read, write and convert weight files, load them into models, and list published weights."""
