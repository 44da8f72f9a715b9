package main

import (
	"fmt"
	"slices"
	"time"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
)

const (
	lookupPatience  = 5 * time.Second
	lookupDeadline  = 1_000_000 // microseconds: no answer of a busy machine is given up
	lookupWarmUp    = 50        // questions that do not count
	echoMaxReply    = 64
	microsPerSecond = 1e6
)

// measure asks rounds times, each time the agent and the other server in an order that changes.
func (b *lookupBench) measure(form ipc.Form, n, rounds int) (lookupRow, error) {
	own, echo := make([]float64, 0, rounds), make([]float64, 0, rounds)
	var q question
	for i := range rounds + lookupWarmUp {
		if err := b.draw(&q, form, n); err != nil {
			return lookupRow{}, err
		}
		var took [2]time.Duration
		for _, second := range []bool{i%2 == 0, i%2 != 0} {
			var err error
			if second {
				took[1], err = b.askEcho(&q)
			} else {
				took[0], err = b.askAgent(&q)
			}
			if err != nil {
				return lookupRow{}, err
			}
		}
		if i >= lookupWarmUp {
			own, echo = append(own, took[0].Seconds()*microsPerSecond), append(echo, took[1].Seconds()*microsPerSecond)
		}
	}
	slices.Sort(own)
	slices.Sort(echo)
	r := lookupRow{Form: form.String(), Hashes: n, Ranks: b.ranks, P50us: own[rounds/2], P99us: own[rounds*99/100],
		EchoP50us: echo[rounds/2], EchoP99us: echo[rounds*99/100]}
	r.RatioP50 = r.P50us / r.EchoP50us
	return r, nil
}

// question is a request as it is sent; its memory is used again.
type question struct {
	request ipc.LookupRequest
	frames  ipc.Frames
	want    uint32 // tokens, all of them hits
	blob    []byte
}

// draw makes a question for n hashes from anywhere in a stored chain.
func (b *lookupBench) draw(q *question, form ipc.Form, n int) error {
	chain := benchChain(q.blob[:0], b.random.IntN(b.chains), lookupChain)
	q.blob = chain.Blob
	from := b.random.IntN(lookupChain-n+1) * pool.MaxHashLen
	q.want = uint32(n * lookupBlockTokens)
	q.request = ipc.LookupRequest{Form: form, Tokens: uint64(q.want) + 1, HashLen: pool.MaxHashLen, Hashes: q.blob[from : from+n*pool.MaxHashLen]}
	if form == ipc.FormOwn {
		q.request.Session, q.request.Reserve, q.request.DeadlineUS = b.session, true, lookupDeadline
	}
	q.frames.Reset()
	return ipc.AppendRequest(&q.frames, &q.request)
}

// askAgent asks, checks that all is found, and gives back what was reserved outside of the time.
func (b *lookupBench) askAgent(q *question) (time.Duration, error) {
	if err := b.settle(0); err != nil {
		return 0, err
	}
	start := time.Now()
	answer, err := b.client.Exchange(&q.frames, lookupPatience)
	took := time.Since(start)
	if err != nil {
		return 0, err
	}
	a, _, err := ipc.DecodeReply(q.request.Form, answer)
	if err != nil {
		return 0, err
	}
	tokens := a.Tokens
	if q.request.Form == ipc.FormSimple {
		tokens = uint32(a.Blocks) * lookupBlockTokens
	}
	if a.Status != ipc.LookupHit || tokens != q.want {
		return 0, fmt.Errorf("status %d, %d tokens, want %d", a.Status, tokens, q.want)
	}
	b.echo.reply.Store(int32(len(answer)))
	return took, b.settle(a.Lease)
}

func (b *lookupBench) askEcho(q *question) (time.Duration, error) {
	if err := b.settle(0); err != nil {
		return 0, err
	}
	start := time.Now()
	_, err := b.echoClient.Exchange(&q.frames, lookupPatience)
	return time.Since(start), err
}

// settle releases a lease, if it is one, and waits until the agent has done it: so both servers are asked from the
// same rest.
func (b *lookupBench) settle(lease uint64) error {
	if lease != 0 {
		if err := b.scheduler.Send(&ipc.Release{Leases: []uint64{lease}}); err != nil {
			return err
		}
	}
	if err := b.scheduler.Send(&ipc.Ping{}); err != nil {
		return err
	}
	for {
		m, _, err := b.scheduler.Recv()
		if _, pong := m.(*ipc.Pong); pong || err != nil {
			return err
		}
	}
}
