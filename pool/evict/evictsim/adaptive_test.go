package evictsim

import "testing"

// TestAdaptiveReferences compares ARC and S3-FIFO with what LRU gets wrong: prompts read once among
// others that are repeated; and with the optimum, which none exceeds.
func TestAdaptiveReferences(t *testing.T) {
	for _, w := range Workloads {
		if w.Name != "scan" && w.Name != "documents" {
			continue
		}
		s := w.Make(3)
		lru, best := LRU(s, 3000).HitRate(), Optimum(s, 3000).HitRate()
		for name, run := range map[string]func(*Stream, int) Result{"ARC": ARC, "S3-FIFO": S3FIFO} {
			got := run(s, 3000).HitRate()
			t.Logf("%s: %s %.4f, LRU %.4f, optimum %.4f", w.Name, name, got, lru, best)
			if got <= lru || got > best {
				t.Errorf("%s: %s %.4f, LRU %.4f, optimum %.4f", w.Name, name, got, lru, best)
			}
			if all := run(s, s.Blocks).Hits; all != LRU(s, s.Blocks).Hits {
				t.Errorf("%s: %s has %d hits with room for all", w.Name, name, all)
			}
		}
	}
}
