package transfer

import (
	"math/rand/v2"
	"testing"
	"time"
)

// laneTest is lanes on a clock that stands still.
type laneTest struct {
	*Lanes
	t     *testing.T
	clock time.Time
}

func newLaneTest(t *testing.T, n int) *laneTest {
	l := &laneTest{t: t}
	l.Lanes = NewLanes(n, 50*time.Millisecond, func() time.Time { return l.clock })
	return l
}

func granted(k *ticket) bool {
	select {
	case <-k.granted:
		return true
	default:
		return false
	}
}

func (l *laneTest) want(granteds ...*ticket) {
	l.t.Helper()
	for i, k := range granteds {
		if !granted(k) {
			l.t.Fatalf("ticket %d has no lane", i)
		}
	}
}

func (l *laneTest) wantNot(waiting ...*ticket) {
	l.t.Helper()
	for i, k := range waiting {
		if granted(k) {
			l.t.Fatalf("ticket %d has a lane", i)
		}
	}
}

func TestLoadsGoBeforeSaves(t *testing.T) {
	l := newLaneTest(t, 1)
	first := l.enter(Save)
	s1, s2, l1, l2 := l.enter(Save), l.enter(Save), l.enter(Load), l.enter(Load)
	l.want(first)
	l.wantNot(s1, s2, l1, l2)
	l.leave(first)
	l.want(l1)
	l.leave(l1)
	l.want(l2)
	l.wantNot(s1, s2)
	l.leave(l2)
	l.want(s1)
	l.leave(s1)
	l.want(s2)
}

// TestAgedSavesTakeTurnsWithLoads expects neither kind to starve after SaveAge.
func TestAgedSavesTakeTurnsWithLoads(t *testing.T) {
	l := newLaneTest(t, 1)
	now := l.enter(Load)
	var saves, loads int
	for range 20 {
		l.enter(Save)
		l.enter(Load)
	}
	l.clock = l.clock.Add(time.Second)
	for range 20 {
		waiting := [2][]*ticket{l.mu.waiting[Save], l.mu.waiting[Load]}
		l.leave(now)
		switch {
		case granted(waiting[Save][0]):
			now, saves = waiting[Save][0], saves+1
		case granted(waiting[Load][0]):
			now, loads = waiting[Load][0], loads+1
		default:
			t.Fatal("the lane is free")
		}
	}
	if saves != 10 || loads != 10 {
		t.Errorf("%d aged saves and %d loads in 20 turns, want 10 of each", saves, loads)
	}
}

func TestYoungSaveWaitsForLoads(t *testing.T) {
	l := newLaneTest(t, 1)
	now := l.enter(Load)
	s := l.enter(Save)
	l.clock = l.clock.Add(49 * time.Millisecond)
	next := l.enter(Load)
	l.leave(now)
	l.want(next)
	third := l.enter(Load)
	l.clock = l.clock.Add(time.Millisecond)
	l.leave(next)
	l.want(s)
	l.wantNot(third)
}

func TestWaitForALaneIsGivenUp(t *testing.T) {
	l := newLaneTest(t, 1)
	now, given, next := l.enter(Load), l.enter(Load), l.enter(Load)
	l.leave(given)
	l.leave(now)
	l.want(next)
	l.wantNot(given)
	l.leave(next)
	l.want(l.enter(Save))
}

// TestLanesNeverOverlap draws many entries and leaves, and counts.
func TestLanesNeverOverlap(t *testing.T) {
	const n = 3
	random := rand.New(rand.NewPCG(1, 9))
	l := newLaneTest(t, n)
	var all []*ticket
	for range 20_000 {
		if len(all) == 0 || random.IntN(2) == 0 {
			all = append(all, l.enter(Kind(random.IntN(2))))
		} else {
			i := random.IntN(len(all))
			l.leave(all[i])
			all = append(all[:i], all[i+1:]...)
		}
		l.clock = l.clock.Add(time.Duration(random.IntN(20)) * time.Millisecond)
		holds := 0
		for _, k := range all {
			if granted(k) {
				holds++
			}
		}
		if want := min(n, len(all)); holds != want {
			t.Fatalf("%d of %d tickets hold a lane, want %d", holds, len(all), want)
		}
	}
}

// TestOneMoreLane expects a further lane to be a free one, for a save not the last, and to be
// returned like any other.
func TestOneMoreLane(t *testing.T) {
	l := newLaneTest(t, 3)
	first := l.enter(Save)
	second, ok := l.try(Save)
	if !ok {
		t.Fatal("a save gets no second lane of three")
	}
	if _, ok := l.try(Save); ok {
		t.Fatal("a save got the last lane: a load that comes has to wait")
	}
	third, ok := l.try(Load)
	if !ok {
		t.Fatal("a load does not get the last lane")
	}
	if _, ok := l.try(Load); ok {
		t.Fatal("four lanes of three")
	}
	waits := l.enter(Load)
	l.want(first)
	l.wantNot(waits)
	l.leave(second)
	l.want(waits)
	for _, k := range []*ticket{first, third, waits} {
		l.leave(k)
	}
	if l.mu.free != 3 {
		t.Errorf("%d lanes are free, want 3", l.mu.free)
	}
}

// TestFlightLeavesItsLaneOnce expects a flight that is used again without a lane, as by a staged
// load, to leave none.
func TestFlightLeavesItsLaneOnce(t *testing.T) {
	l := newLaneTest(t, 1)
	th := &thread{w: &Worker{cfg: Config{Lanes: l.Lanes}}}
	f := th.spare()
	f.lane = l.enter(Load)
	th.recycle(f)
	if again := th.spare(); again != f || again.lane != nil {
		t.Fatalf("a recycled flight has lane %v, want none", again.lane)
	}
	l.want(l.enter(Load))
}
