// Package pace limits how fast copies that can wait go beside an engine's decode steps: a budget of
// bytes, and a controller that sets it from the times of the steps. It copies nothing itself.
package pace

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"
)

// Settings of a Pacer besides a rate in bytes per second.
const (
	Off  int64 = 0  // no copy waits
	Auto int64 = -1 // copies wait if they are seen to make decode steps slower
)

// MinRate and MaxRate bound a fixed rate, bytes per second.
const (
	MinRate int64 = 1 << 20
	MaxRate int64 = 1 << 42
)

// Urgency of a copy.
type Urgency uint8

// The urgencies, the most urgent first. An urgent copy never waits, and is not counted against the
// budget: a load, or what another engine waits for.
const (
	Urgent Urgency = iota
	Save           // a save that can be revoked
	Behind         // a copy of a stored block to a lower tier
)

// Limits of waiting.
const (
	maxWait   = 10 * time.Second     // longest wait for the budget, however large the batch before
	behindAge = time.Second          // a copy to a tier that has waited this long goes with the saves
	lookAgain = 5 * time.Millisecond // longest pause between two questions whether to go on waiting
	lateness  = 2 * time.Millisecond // how late a copy may begin without losing its budget
	batchTime = time.Millisecond     // of the budget in one batch, so that copies are spread evenly
	minBatch  = 256 << 10            // bytes; smaller batches cost more than they spread
)

// Pacer is the budget of the copies that contend for one memory: those of one GPU, or of the CPUs.
// All methods may be called concurrently. A nil Pacer delays nothing.
type Pacer struct {
	setting int64
	now     func() time.Time

	mu struct {
		sync.Mutex
		ended   bool
		next    time.Time // when the budget has room for the next batch
		saves   int       // turns of saves that wait
		copies  [2]spans  // of copies that give way, and of urgent ones
		moved   int64     // bytes of copies that give way
		control control
		counts  Counts
	}
}

// Counts since New.
type Counts struct {
	// Decode steps: without copies, beside those that give way, beside others.
	Alone  uint64 `json:"steps_alone" metric:"pace_steps_total{beside=none}"`
	Beside uint64 `json:"steps_beside" metric:"pace_steps_total{beside=waiting}"`
	Other  uint64 `json:"steps_other" metric:"pace_steps_total{beside=other}"`
	// Decisions about the rate; pauses to measure steps without copies.
	Cuts   uint64 `json:"cuts" metric:"pace_changes_total{change=cut}"`
	Raises uint64 `json:"raises" metric:"pace_changes_total{change=raise}"`
	Holds  uint64 `json:"holds" metric:"pace_changes_total{change=hold}"`

	// Seconds of waits for the budget, of saves and of writes to tiers.
	SaveWaitS  float64 `json:"save_wait_s" metric:"pace_wait_seconds_total{op=save}"`
	WriteWaitS float64 `json:"write_wait_s" metric:"pace_wait_seconds_total{op=write}"`
}

// Report is the state of a Pacer, for people and metrics.
type Report struct {
	Device  string `json:"device" label:"device"` // cpu, or the GPU's name; empty: no pacer of Devices
	Setting string `json:"setting"`               // off, auto or fixed
	// Rate is what copies may take now, bytes per second; 0: any.
	Rate int64 `json:"rate_bytes_s" metric:"pace_rate_bytes_per_second"`
	// Slowdown is decode steps beside copies, in those without, as last compared; 0: never.
	Slowdown float64 `json:"slowdown_ratio" metric:"pace_slowdown_ratio"`
	Counts
}

// New makes a pacer with a setting. now is the clock, nil for time.Now.
func New(setting int64, now func() time.Time) *Pacer {
	if now == nil {
		now = time.Now
	}
	p := &Pacer{setting: setting, now: now}
	if setting > 0 {
		p.mu.control.rate = float64(setting)
	}
	return p
}

// End lifts the limit for good: the agent ends, and what runs is to end soon.
func (p *Pacer) End() {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.ended = true
}

// Report returns the state.
func (p *Pacer) Report() Report {
	p.mu.Lock()
	defer p.mu.Unlock()
	r := Report{
		Setting: "fixed", Rate: int64(p.rateLocked(p.now())), Slowdown: p.mu.control.slowdown, Counts: p.mu.counts,
	}
	switch p.setting {
	case Off:
		r.Setting = "off"
	case Auto:
		r.Setting = "auto"
	}
	return r
}

// rateLocked returns the rate that holds now, 0 for none; one set by steps only while they come.
func (p *Pacer) rateLocked(now time.Time) float64 {
	if p.mu.ended || p.setting == Auto && !p.mu.control.decoding(now) {
		return 0
	}
	return p.mu.control.rate
}

// Turn is a wait for the budget.
type Turn struct {
	pacer   *Pacer
	urgency Urgency
	since   time.Time
	waited  bool
}

// Enter begins to wait. The caller asks Delay until it is 0, and calls Leave in any case.
func (p *Pacer) Enter(u Urgency) *Turn {
	t := &Turn{pacer: p, urgency: u}
	if p == nil || p.setting == Off || u == Urgent {
		t.urgency = Urgent
		return t
	}
	t.since = p.now()
	p.mu.Lock()
	defer p.mu.Unlock()
	if u == Save {
		p.mu.saves++
	}
	return t
}

// Delay returns for how long to wait before asking again; 0: the next batch may begin.
func (t *Turn) Delay() time.Duration {
	if t.urgency == Urgent {
		return 0
	}
	p := t.pacer
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.now()
	wait := p.delayLocked(now)
	if wait == 0 && t.urgency == Behind && p.mu.saves > 0 && now.Sub(t.since) < behindAge && p.rateLocked(now) > 0 {
		wait = lookAgain
	}
	t.waited = t.waited || wait > 0
	return min(wait, lookAgain)
}

// Leave ends the wait, in vain or not.
func (t *Turn) Leave() {
	if t.urgency == Urgent {
		return
	}
	p := t.pacer
	p.mu.Lock()
	defer p.mu.Unlock()
	waited := &p.mu.counts.WriteWaitS
	if t.urgency == Save {
		p.mu.saves--
		waited = &p.mu.counts.SaveWaitS
	}
	if t.waited {
		*waited += p.now().Sub(t.since).Seconds()
	}
}

// Await waits for the budget, or until ctx ends, and records that a copy begins. The caller calls
// ended after it.
func (p *Pacer) Await(ctx context.Context, u Urgency, bytes int64) (ended func()) {
	t := p.Enter(u)
	defer t.Leave()
	for wait := t.Delay(); wait > 0 && ctx.Err() == nil; wait = t.Delay() {
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
		}
	}
	p.Begin(u, bytes)
	return func() { p.Ended(u) }
}

// May reports whether a save's next batch may begin now.
func (p *Pacer) May() bool {
	if p == nil || p.setting == Off {
		return true
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.delayLocked(p.now()) == 0
}

func (p *Pacer) delayLocked(now time.Time) time.Duration {
	if p.mu.ended {
		return 0
	}
	wait := p.mu.control.held.Sub(now)
	if p.rateLocked(now) > 0 {
		debt := p.mu.next.Sub(now)
		p.mu.control.limited = p.mu.control.limited || debt > 0
		wait = max(wait, debt)
	}
	return max(wait, 0)
}

// Batch returns the bytes of the next batch of a save, of at most most: fewer under a limit, so
// that the copies are spread over the steps.
func (p *Pacer) Batch(most int64) int64 {
	if p == nil || p.setting == Off {
		return most
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	rate := p.rateLocked(p.now())
	if rate == 0 {
		return most
	}
	return min(most, max(minBatch, int64(rate*batchTime.Seconds())))
}

// Begin records that a copy begins, and takes its bytes from the budget unless it is urgent. The
// caller calls Ended after it.
func (p *Pacer) Begin(u Urgency, bytes int64) {
	if p == nil || p.setting == Off {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.now()
	p.copiesLocked(u).begin(now)
	if u == Urgent {
		return
	}
	p.mu.moved += bytes
	rate := p.rateLocked(now)
	if rate == 0 {
		p.mu.next = now
		return
	}
	if earliest := now.Add(-lateness); p.mu.next.Before(earliest) {
		p.mu.next = earliest
	}
	p.mu.next = p.mu.next.Add(time.Duration(float64(bytes) / rate * float64(time.Second)))
	if latest := now.Add(maxWait); p.mu.next.After(latest) {
		p.mu.next = latest
	}
}

// Ended records that a copy has ended.
func (p *Pacer) Ended(u Urgency) {
	if p == nil || p.setting == Off {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.copiesLocked(u).end(p.now())
}

func (p *Pacer) copiesLocked(u Urgency) *spans {
	if u == Urgent {
		return &p.mu.copies[1]
	}
	return &p.mu.copies[0]
}

const (
	maxSpans = 1024                 // that are kept
	spanGap  = 2 * time.Millisecond // a shorter pause between copies counts as copying
)

// spans are the times in which copies ran, the newest last. Copies that overlap, or follow each
// other closely, are one span.
type spans struct {
	running int
	since   time.Time // if running
	ended   []span
	lost    time.Time // what was before is not known any more
}

type span struct{ begin, end time.Time }

func (s *spans) begin(now time.Time) {
	if s.running++; s.running > 1 {
		return
	}
	s.since = now
	if n := len(s.ended); n > 0 && now.Sub(s.ended[n-1].end) < spanGap {
		s.since = s.ended[n-1].begin
		s.ended = s.ended[:n-1]
	}
}

func (s *spans) end(now time.Time) {
	if s.running--; s.running > 0 {
		return
	}
	if len(s.ended) == 2*maxSpans {
		s.lost = s.ended[maxSpans-1].end
		s.ended = append(s.ended[:0], s.ended[maxSpans:]...)
	}
	s.ended = append(s.ended, span{s.since, now})
}

// overlap reports whether copies ran between begin and end, or that is no longer known.
func (s *spans) overlap(begin, end time.Time) bool {
	if begin.Before(s.lost) || s.running > 0 && s.since.Before(end) {
		return true
	}
	for i := len(s.ended) - 1; i >= 0 && s.ended[i].end.After(begin); i-- {
		if s.ended[i].begin.Before(end) {
			return true
		}
	}
	return false
}

// CPU is the name of the CPUs among the devices.
const CPU = "cpu"

// Devices are the pacers of a node: copies on one GPU do not slow the engines of another.
type Devices struct {
	setting int64

	mu struct {
		sync.Mutex
		ended bool
		all   map[string]*Pacer // by the device's name
	}
}

// NewDevices makes the pacers of a node, of which that of the CPUs exists.
func NewDevices(setting int64, cpu *Pacer) *Devices {
	d := &Devices{setting: setting}
	d.mu.all = map[string]*Pacer{CPU: cpu}
	return d
}

// Of returns the pacer of a device.
func (d *Devices) Of(device string) *Pacer {
	d.mu.Lock()
	defer d.mu.Unlock()
	p := d.mu.all[device]
	if p == nil {
		p = New(d.setting, nil)
		d.mu.all[device] = p
		if d.mu.ended {
			p.End()
		}
	}
	return p
}

// End lifts all limits for good.
func (d *Devices) End() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.mu.ended = true
	for _, p := range d.mu.all {
		p.End()
	}
}

// Report returns the state of each device's pacer, by name.
func (d *Devices) Report() (out []Report) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, device := range slices.Sorted(maps.Keys(d.mu.all)) {
		r := d.mu.all[device].Report()
		r.Device = device
		out = append(out, r)
	}
	return out
}
