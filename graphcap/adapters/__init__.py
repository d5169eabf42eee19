"""What other projects' modules need of a capture. Nothing here is imported by the core; each adapter is found when a
module of its project is captured."""
