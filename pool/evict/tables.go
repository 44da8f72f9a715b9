package evict

// tables count, per class and bin of age, how many blocks came into the bin and how many were used in it. A block
// counts as at risk when it comes in, not when it is used again or goes: blocks that are still there have told us
// something too (Kaplan and Meier). Counts fade: newer ones weigh more, and all are scaled back now and then.
type tables struct {
	risk, used [numClasses][numBins]float64
	weight     float64 // of a count made now
}

const (
	fading    = 1 / 0.9997 // growth of the weight per look-up
	maxWeight = 1e9
	forgetful = 20 // what was learned is divided by this on an alarm
)

// enter counts blocks of class c that passed from bin from into bin to, and into all between; from -1 is a new one.
func (t *tables) enter(c uint8, from, to int) {
	for b := from + 1; b <= to; b++ {
		t.risk[c][b] += t.weight
	}
}

func (t *tables) use(c uint8, b int) {
	t.used[c][b] += t.weight
}

// fade makes all counts so far weigh less by one look-up.
func (t *tables) fade() {
	if t.weight *= fading; t.weight > maxWeight {
		t.scale(1 / t.weight)
		t.weight = 1
	}
}

func (t *tables) forget() { t.scale(1. / forgetful) }

func (t *tables) scale(f float64) {
	for c := range t.risk {
		for b := range t.risk[c] {
			t.risk[c][b] *= f
			t.used[c][b] *= f
		}
	}
}
