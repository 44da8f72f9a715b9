package evict

import "testing"

func TestBinsMeetAtTheirEdges(t *testing.T) {
	for b := range numBins - 1 {
		if edges[b+1] > 1<<32-1 {
			break
		}
		if got := binOf(uint32(edges[b])); got != b {
			t.Errorf("an age of %d ms, where bin %d begins, is in bin %d", edges[b], b, got)
		}
		if got := binOf(uint32(edges[b+1] - 1)); got != b {
			t.Errorf("an age of %d ms, where bin %d ends, is in bin %d", edges[b+1]-1, b, got)
		}
	}
	if got := binOf(1<<32 - 1); got >= numBins {
		t.Errorf("the greatest age is in bin %d of %d", got, numBins)
	}
}
