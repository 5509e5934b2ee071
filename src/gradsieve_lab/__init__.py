"""The lab: tasks, recorded runs, reports, benchmarks and a network of slow links. Needs `gradsieve[lab]`."""
