package mockengine

import (
	"time"

	"github.com/kvagent/kvagent/ipc"
)

// Limits of the circuit breaker of look-ups. After breakAfter unanswered ones it opens, and
// requests do not wait for an agent that does not answer; then one look-up tries again, at most
// every breakLast.
const (
	breakAfter = 2
	breakFirst = 200 * time.Millisecond
	breakLast  = 500 * time.Millisecond
)

// asker asks the look-up socket of the current attachment. It belongs to one goroutine.
type asker struct {
	timeout    time.Duration
	client     *ipc.LookupClient // of path
	path       string
	attachment uint32
	blob       []byte // hashes of the question, joined
	breaker    breaker
}

// ask returns a miss, at once, while the breaker is open.
func (k *asker) ask(a *attachment, q *Question) Answer {
	if a.number != k.attachment {
		k.connect(a)
	}
	now := time.Now()
	if k.breaker.open(now) {
		return Answer{Failed: true}
	}
	k.blob = k.blob[:0]
	for i := range q.Hashes {
		k.blob = append(k.blob, q.Hashes[i][:]...)
	}
	reply, err := k.client.Ask(&ipc.LookupRequest{
		Space: a.space, Session: a.session, Want: ipc.WantReserve, Tokens: uint64(q.Tokens),
		HBMTokens:  uint32(q.Own),
		DeadlineUS: uint32(k.timeout.Microseconds()), HashLen: len(Hash{}), Hashes: k.blob,
	}, k.timeout)
	if err != nil {
		k.breaker.failed(time.Now())
		return Answer{Failed: true}
	}
	k.breaker.succeeded()
	if reply.Boot != a.boot {
		return Answer{Failed: true} // from another attachment: the lease must not be used
	}
	return answer(a, &reply)
}

// answer interprets a reply. A block that is stored but not pinned may still be loaded: if it was
// evicted by then, the load reports it.
func answer(a *attachment, r *ipc.LookupReply) Answer {
	switch r.Status {
	case ipc.LookupHit, ipc.LookupNoSession, ipc.LookupLeaseCap:
		return Answer{Tokens: int(r.Tokens), Lease: leaseOf(a, r)}
	case ipc.LookupPending:
		return Answer{Tokens: int(r.Tokens), Lease: leaseOf(a, r), Pending: true}
	case ipc.LookupOverloaded:
		return Answer{Failed: true}
	default:
		return Answer{}
	}
}

// leaseOf returns the lease of a reply, if it has one.
func leaseOf(a *attachment, r *ipc.LookupReply) Lease {
	if r.Lease == 0 {
		return Lease{}
	}
	return Lease{Attachment: a.number, Number: r.Lease}
}

func (k *asker) connect(a *attachment) {
	k.attachment = a.number
	k.breaker = breaker{}
	if k.client != nil && k.path == a.lookupPath {
		return
	}
	k.close()
	k.client, k.path = ipc.DialLookup(a.lookupPath), a.lookupPath
}

func (k *asker) close() {
	if k.client != nil {
		k.client.Close()
		k.client = nil
	}
}

// breaker counts failures in a row.
type breaker struct {
	failures int
	pause    time.Duration
	until    time.Time
}

func (b *breaker) open(now time.Time) bool { return now.Before(b.until) }

func (b *breaker) failed(now time.Time) {
	if b.failures++; b.failures < breakAfter {
		return
	}
	b.pause = min(max(2*b.pause, breakFirst), breakLast)
	b.until = now.Add(b.pause)
}

func (b *breaker) succeeded() { *b = breaker{} }

// answers reports whether there is an agent and the breaker is closed. It is for the goroutine that
// asks.
func (l *Link) answers() bool {
	return l.attached() != nil && !l.asker.breaker.open(time.Now())
}
