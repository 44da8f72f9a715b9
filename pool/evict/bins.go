package evict

import (
	"math"
	"math/bits"
)

const (
	numBins       = 39 // of age, at most 64; the last begins at 14 hours
	binsPerOctave = 3
	firstShift    = 13 // bins are even in the logarithm of 1<<firstShift ms + age
	fineShift     = 5  // edges are multiples of this part of an octave
)

// thirds is the bin within an octave, by its 32nds: 2^(1/3) is about 41/32 and 2^(2/3) about 51/32.
var thirds = func() (t [1 << fineShift]uint8) {
	for i := 9; i < 19; i++ {
		t[i] = 1
	}
	for i := 19; i < len(t); i++ {
		t[i] = 2
	}
	return t
}()

// binOf is the bin of an age in ms.
func binOf(age uint32) int {
	at := uint64(age) + 1<<firstShift
	octave := bits.Len64(at) - 1 - firstShift
	fine := at >> (octave + firstShift - fineShift) & (1<<fineShift - 1)
	return min(octave*binsPerOctave+int(thirds[fine]), numBins-1)
}

// edges[i] is the age in ms at which bin i begins; the last bin has no end but this.
var edges = func() (e [numBins + 1]int64) {
	for i := range e {
		fine := [binsPerOctave]int64{32, 41, 51}[i%binsPerOctave]
		e[i] = fine<<(i/binsPerOctave+firstShift-fineShift) - 1<<firstShift
	}
	return e
}()

// ends[i] is the age in ms at which bin i ends; the last does not before the greatest age.
var ends = func() (e [1 << 6]uint32) {
	for i := range e {
		e[i] = math.MaxUint32
		if i < numBins-1 {
			e[i] = uint32(edges[i+1])
		}
	}
	return e
}()

// width of a bin in seconds.
func width(bin int) float64 { return widths[bin] }

var widths = func() (w [numBins]float64) {
	for b := range w {
		w[b] = float64(edges[b+1]-edges[b]) / 1000
	}
	return w
}()
