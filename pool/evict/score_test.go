package evict

import (
	"math"
	"math/rand/v2"
	"testing"
)

// slowIndex is the definition: from the middle of bin b, the best stop at a later edge.
func slowIndex(hazard *[numBins]float64, b int) float64 {
	alive, hits, time := 1-hazard[b], hazard[b]/2, width(b)*(1-hazard[b]/2)/2
	best := hits / time
	for j := b + 1; j < numBins; j++ {
		hits += alive * hazard[j]
		time += alive * width(j) * (1 - hazard[j]/2)
		alive *= 1 - hazard[j]
		best = max(best, hits/time)
	}
	return best
}

func TestIndexIsTheBestStop(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 100 {
		var hazard [numBins]float64
		for b := range hazard {
			hazard[b] = 0.1 * r.Float64() * r.Float64()
		}
		var w worths
		index(&hazard, &w)
		for b := range w {
			if want := slowIndex(&hazard, b); math.Abs(float64(w[b])-want) > 1e-4*want {
				t.Fatalf("bin %d is worth %g, the best stop gives %g", b, w[b], want)
			}
		}
	}
}
