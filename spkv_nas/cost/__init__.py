"""What attention costs: FLOPs, bytes and times, counted, bounded or measured; the scaling ladder and its law."""
