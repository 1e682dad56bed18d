"""The cost model of a cluster: descriptions of machines, and seconds of operators, collectives and transfers."""
