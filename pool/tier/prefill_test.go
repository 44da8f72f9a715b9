package tier

import (
	"sync/atomic"
	"testing"
	"time"
)

// measure makes a tier as fast as a fetch of so many bytes in so long.
func (l *level) measure(bytes int64, took time.Duration) {
	l.speed.bytes, l.speed.seconds, l.speed.delay = 0, 0, 0
	now := l.p.now()
	l.speed.fetching(now.Add(-took))
	l.speed.fetched(bytes, took, now)
}

// TestNetBenefit checks that an answer is cut where loading takes longer than computing.
func TestNetBenefit(t *testing.T) {
	h := chain("a", 40)
	n, _, _ := filled(t, h, nil, Tier{}, Options{PrefillTokens: 1e6}) // 16 us for a block of 2 KiB: 128 MB/s
	l := n.levels[0]
	if got := n.know(h); got != 40 {
		t.Fatalf("%d before anything was measured, want 40", got)
	}
	l.measure(1<<20, time.Second)
	if got := n.Prefix(n.space, 0, h); got != 0 {
		t.Errorf("%d blocks of a tier that takes longer than computing them", got)
	}
	l.measure(1<<30, time.Second)
	l.speed.delay = 0.0004 // s: more than 20 blocks take, less than 40
	if a, b := n.Prefix(n.space, 0, h.Slice(0, 20)), n.Prefix(n.space, 0, h); a != 0 || b != 40 {
		t.Errorf("%d of 20, %d of 40 blocks; want 0: too few for the delay, and 40", a, b)
	}
}

// TestLearnedPrefill checks that learned rates decide what is cut: nothing before enough samples, a
// slow tier's blocks for a fast engine, none of a fast tier's.
func TestLearnedPrefill(t *testing.T) {
	h := chain("a", 40)
	n, _, _ := filled(t, h, nil, Tier{}, Options{LearnPrefill: true})
	l := n.levels[0]
	n.know(h)
	steps := func(many, tokens int, perSecond float64) {
		for range many {
			n.Computed(n.space, tokens, time.Duration(float64(tokens)/perSecond*1e9))
		}
	}
	l.measure(1<<20, time.Second) // 512 blocks of 16 tokens a second: 8,192 tokens
	for _, c := range []struct {
		what      string
		many      int
		tokens    int
		perSecond float64
		want      int
	}{
		{"too few steps", prefillEnough - 1, 2048, 1e6, 40},
		{"a step more, of few tokens", 1, prefillTokens - 1, 1e6, 40},
		{"a fast engine over a slow tier", 1, 2048, 1e6, 0},
		{"a tenth of its steps wrong by far", prefillSamples / 10, 2048, 1e2, 0},
		{"a slow engine", prefillSamples, 2048, 4e3, 40},
		{"a tenth of its steps wrong by far", prefillSamples / 10, 2048, 1e9, 40},
		{"a step in no time", 100, 2048, 1e18, 40},
	} {
		steps(c.many, c.tokens, c.perSecond)
		if got := n.Prefix(n.space, 0, h); got != c.want {
			t.Errorf("%s: %d of 40 blocks, want %d", c.what, got, c.want)
		}
	}
	steps(prefillSamples, 2048, 1e5)
	if got := n.Prefix(n.space, 0, h); got != 0 {
		t.Errorf("%d blocks of a tier that takes longer than computing them", got)
	}
	l.measure(1<<30, time.Second)
	if got := n.Prefix(n.space, 0, h); got != 40 {
		t.Errorf("%d of 40 blocks of a fast tier", got)
	}
	n.Computed(n.space+1, 2048, time.Second) // not open
	if _, err := Open(n.mem, nil, Options{LearnPrefill: true, PrefillTokens: 1}); err == nil {
		t.Error("a rate was given and is to be learned, and nobody minds")
	}
}

// TestWrongPrefillIsBounded checks that a rate that is wrong by any factor costs no more than a
// pool without the tier: memory's part is answered, and the tier is tried again.
func TestWrongPrefillIsBounded(t *testing.T) {
	var ahead atomic.Int64
	clock := func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) }
	h := chain("a", 40)
	n, _, _ := filled(t, h, nil, Tier{FoundFor: time.Hour}, Options{LearnPrefill: true, Clock: clock})
	n.save(h.Slice(0, 7))
	n.know(h)
	n.levels[0].measure(1<<30, time.Second)
	for range prefillSamples {
		n.Computed(n.space, 1<<20, time.Microsecond)
	}
	if got := n.Prefix(n.space, 0, h); got != 7 {
		t.Fatalf("%d blocks, want the 7 of memory", got)
	}
	tried := time.Duration(0)
	for ; n.Prefix(n.space, 0, h) != 40; tried += speedAge {
		if tried > 20*speedAge {
			t.Fatalf("a tier of 1 GiB/s is not tried again within %v", tried)
		}
		ahead.Add(int64(speedAge))
	}
	t.Logf("tried again after %v", tried)
}

// TestPaceOfManyFetches checks that concurrent fetches are one busy period, so that a tier is as
// fast as all its workers. Its delay does not count as time of the bytes.
func TestPaceOfManyFetches(t *testing.T) {
	var p storeSpeed
	now := time.Unix(1000, 0)
	const mib = 1 << 20
	for range 4 {
		p.fetching(now)
	}
	for i := range 4 {
		p.fetched(8*mib, time.Second, now.Add(time.Second+time.Duration(i)))
	}
	if rate, _, _, _ := p.report(); rate < 31*mib || rate > 33*mib {
		t.Errorf("%.1f MiB/s of 4 fetches at once, want 32", rate/mib)
	}
	p = storeSpeed{}
	p.asked(time.Millisecond)
	for range 100 { // small ones: 4 KiB a millisecond after the delay
		p.fetching(now)
		p.fetched(4<<10, 2*time.Millisecond, now.Add(2*time.Millisecond))
	}
	if rate, _, _, _ := p.report(); rate < 3.9e6 || rate > 4.3e6 {
		t.Errorf("%.2g B/s, want 4.1e6: 4 KiB in a millisecond", rate)
	}
	p = storeSpeed{}
	p.fetching(now)
	for i := range 50 { // one under way always
		at := now.Add(time.Duration(i) * 300 * time.Millisecond)
		p.fetching(at)
		p.fetched(mib, 300*time.Millisecond, at.Add(300*time.Millisecond))
	}
	if rate, _, _, _ := p.report(); rate < 3*mib || rate > 4*mib {
		t.Errorf("%.1f MiB/s of a tier that never rests, want 3.3", rate/mib)
	}
}
