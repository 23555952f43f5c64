"""Running a night: its plan, its cells, the accelerator, the fan-out over workers, and the files of finished results."""
