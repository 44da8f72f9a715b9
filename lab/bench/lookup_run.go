package bench

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
)

const (
	lookupPatience = 5 * time.Second
	lookupDeadline = 1_000_000 // microseconds: long enough for every answer of a busy machine
	lookupWarmUp   = 50        // questions of each client that do not count
	lookupTurn     = 10        // questions that each of several clients draws at once
)

// measure asks that many rounds, and more until a save has ended beside them, if there is an engine
// that saves.
func (b *lookupBench) measure(form ipc.Form, n, rounds int) (lookupRow, error) {
	r := lookupRow{Form: form.String(), Hashes: n, Ranks: b.ranks, Clients: len(b.askers)}
	each := 1
	if len(b.askers) > 1 {
		each = lookupTurn
	}
	var took []float64
	saved, start := b.saved(), time.Now()
	for asked := 0; len(took) < rounds || b.savesSince(saved) == 0 && b.saving(); asked += each {
		for _, a := range b.askers {
			if err := a.draw(form, n, each); err != nil {
				return r, err
			}
		}
		turn, err := b.turn()
		if err != nil {
			return r, err
		}
		if asked >= lookupWarmUp {
			took = append(took, turn...)
		}
	}
	slices.Sort(took)
	r.P50us, r.P99us = took[len(took)/2], took[len(took)*99/100]
	r.SavedGBs = float64(b.savesSince(saved)) / time.Since(start).Seconds() / 1e9
	return r, nil
}

// saving reports whether an engine saves meanwhile.
func (b *lookupBench) saving() bool { return b.saver != nil && !b.saver.ended.Load() }

// savesSince returns the bytes that were saved since saved returned before.
func (b *lookupBench) savesSince(before int64) int64 { return b.saved() - before }

func (b *lookupBench) saved() int64 {
	if b.saver == nil {
		return 0
	}
	return b.saver.bytes.Load()
}

// turn lets all clients concurrently ask what they drew, and returns the times in microseconds.
func (b *lookupBench) turn() (took []float64, err error) {
	if len(b.askers) == 1 {
		return b.askers[0].turn()
	}
	var joins sync.WaitGroup
	var mu sync.Mutex
	for _, a := range b.askers {
		joins.Go(func() {
			one, bad := a.turn()
			mu.Lock()
			defer mu.Unlock()
			took, err = append(took, one...), errors.Join(err, bad)
		})
	}
	joins.Wait()
	return took, err
}

// asker is one client.
type asker struct {
	bench     *lookupBench
	random    *rand.Rand
	agent     *ipc.LookupClient
	questions []question
}

// question is a request as it is sent; its memory is used again.
type question struct {
	request ipc.LookupRequest
	frames  ipc.Frames
	want    uint32 // tokens, all of them hits
	blob    []byte
}

// draw makes questions for n hashes from anywhere in a stored chain.
func (a *asker) draw(form ipc.Form, n, questions int) error {
	a.questions = slices.Grow(a.questions[:0], questions)[:questions]
	for i := range a.questions {
		if err := a.drawOne(&a.questions[i], form, n); err != nil {
			return err
		}
	}
	return nil
}

func (a *asker) drawOne(q *question, form ipc.Form, n int) error {
	chain := benchChain(q.blob[:0], a.random.IntN(a.bench.chains), lookupChain)
	q.blob = chain.Blob
	from := a.random.IntN(lookupChain-n+1) * pool.MaxHashLen
	q.want = uint32(n * lookupBlockTokens)
	q.request = ipc.LookupRequest{Form: form, Tokens: uint64(q.want) + 1, HashLen: pool.MaxHashLen,
		Hashes: q.blob[from : from+n*pool.MaxHashLen]}
	if form == ipc.FormOwn {
		q.request.Session, q.request.DeadlineUS = a.bench.session, lookupDeadline
		if len(a.bench.askers) == 1 { // the engine's one scheduler releases it between questions
			q.request.Want = ipc.WantReserve
		}
	}
	q.frames.Reset()
	return ipc.AppendRequest(&q.frames, &q.request)
}

// turn asks all questions.
func (a *asker) turn() (took []float64, err error) {
	for i := range a.questions {
		one, err := a.ask(&a.questions[i])
		if err != nil {
			return nil, err
		}
		took = append(took, float64(one.Nanoseconds())/1e3)
	}
	return took, nil
}

// ask asks, checks that everything is found, and releases leases outside of the measured time.
func (a *asker) ask(q *question) (time.Duration, error) {
	if err := a.settle(0); err != nil {
		return 0, err
	}
	start := time.Now()
	answer, err := a.agent.Exchange(&q.frames, lookupPatience)
	took := time.Since(start)
	if err != nil {
		return 0, err
	}
	r, _, err := ipc.DecodeReply(q.request.Form, answer)
	if err != nil {
		return 0, err
	}
	tokens := r.Tokens
	if q.request.Form == ipc.FormSimple {
		tokens = uint32(r.Blocks) * lookupBlockTokens
	}
	if r.Status != ipc.LookupHit || tokens != q.want {
		return 0, fmt.Errorf("status %d, %d tokens, want %d", r.Status, tokens, q.want)
	}
	return took, a.settle(r.Lease)
}

// settle releases a lease, if there is one, and waits until the agent has done it and is idle.
// Several clients reserve nothing, and do not wait.
func (a *asker) settle(lease uint64) error {
	if len(a.bench.askers) > 1 {
		return nil
	}
	c := a.bench.scheduler
	if lease != 0 {
		if err := c.Send(&ipc.Release{Leases: []uint64{lease}}); err != nil {
			return err
		}
	}
	if err := c.Send(&ipc.Ping{}); err != nil {
		return err
	}
	_, err := receive[*ipc.Pong](c)
	return err
}
