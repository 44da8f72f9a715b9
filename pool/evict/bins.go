package evict

import (
	"math"
	"math/bits"
)

const (
	numBins       = 64 // of age; as many as a word has bits
	binsPerOctave = 3
	firstAge      = 1000 // ms: bins are even in the logarithm of firstAge + age
)

// edges[i] is the age in ms at which bin i begins; the last bin has no end but this.
var edges = func() (e [numBins + 1]int64) {
	for i := range e {
		e[i] = int64(math.Round(firstAge * (math.Exp2(float64(i)/binsPerOctave) - 1)))
	}
	return e
}()

// binOf is the bin of an age in ms.
func binOf(age uint32) int {
	octave := bits.Len64((uint64(age)+firstAge)/firstAge) - 1
	i := min(octave*binsPerOctave, numBins-1)
	for i < numBins-1 && int64(age) >= edges[i+1] {
		i++
	}
	return i
}

// width of a bin in seconds.
func width(bin int) float64 { return float64(edges[bin+1]-edges[bin]) / 1000 }
