package pace

import "time"

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

// overlap reports whether copies ran between begin and end. Of a time that is no longer known it
// reports true.
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
