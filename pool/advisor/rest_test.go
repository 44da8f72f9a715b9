package advisor

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// accessed is a policy that only sees look-ups.
type accessed struct {
	Policy
	look func()
}

func (a *accessed) Access(*pool.Use) { a.look() }

// TestDeliveryRests notes more look-ups than a policy can take: the goroutine that delivers them
// leaves it to others, who may wait with the pool's lock held, for most of the time.
func TestDeliveryRests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const each, all = 200 * time.Microsecond, time.Second
		busy := time.Duration(0)
		a := New(&accessed{look: func() { time.Sleep(each); busy += each }}, nil)
		for began := time.Now(); time.Since(began) < all; time.Sleep(each / 4) {
			n := a.Begin()
			n.Use.Prints = append(n.Use.Prints, 1)
			a.End(n)
		}
		a.Close()
		if busy < all/5 || busy > all/3 {
			t.Errorf("the policy is busy with look-ups for %v of %v, want a quarter", busy, all)
		}
	})
}
