package agent

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"strings"
	"testing"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/agent/adminclient"
	"github.com/kvagent/kvagent/agent/events"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// eventLines reads what /events says to one operator.
type eventLines struct {
	t     *testing.T
	lines chan admin.EventLine
	ended chan error
}

// readEvents asks for /events until the test ends.
func (r *rig) readEvents(t *testing.T, query string) *eventLines {
	return r.readEventsUntil(t.Context(), t, query)
}

func (r *rig) readEventsUntil(ctx context.Context, t *testing.T, query string) *eventLines {
	l := &eventLines{t: t, lines: make(chan admin.EventLine, 100), ended: make(chan error, 1)}
	go func() {
		l.ended <- adminclient.New(r.dir).Lines(ctx, "/events?"+query, func(text []byte) error {
			var line admin.EventLine
			if err := json.Unmarshal(text, &line); err != nil {
				return err
			}
			l.lines <- line
			return nil
		})
		close(l.lines)
	}()
	return l
}

// next returns the next line.
func (l *eventLines) next() admin.EventLine {
	l.t.Helper()
	ctx, cancel := context.WithTimeout(l.t.Context(), patience)
	defer cancel()
	select {
	case line, ok := <-l.lines:
		if !ok {
			l.t.Fatalf("the lines have ended: %v", <-l.ended)
		}
		return line
	case <-ctx.Done():
		l.t.Fatal("no line came")
	}
	return admin.EventLine{}
}

// end waits until the agent has ended the answer.
func (l *eventLines) end() (rest []admin.EventLine, err error) {
	l.t.Helper()
	for line := range l.lines {
		rest = append(rest, line)
	}
	return rest, <-l.ended
}

// TestEventLines: what engines' routers are told, an operator reads, with the space's name; a reset
// is one line; the lines end with what is held, or with the agent.
func TestEventLines(t *testing.T) {
	r := newRig(t, withPool(1<<20))
	if rest, err := r.readEvents(t, "").end(); err != nil || len(rest) != 1 || rest[0].Event != admin.EventOff {
		t.Errorf("without an engine: %+v, %v", rest, err)
	}
	follow := r.readEvents(t, "follow=on")
	if line := follow.next(); line.Event != admin.EventOff {
		t.Errorf("%+v, want that events are off", line)
	}
	scheduler, workers, answer := r.joinEngine(register("a"))
	router := newRouter(scheduler)
	router.ask(4, false)
	router.until(0)
	scheduler.say(1, 8)
	scheduler.sync()
	workers[0].save(answer.Epoch, chain(1, 8), 0)
	for blocks := 0; blocks < 8; {
		line := follow.next()
		if line.Event != events.Stored || line.Medium != "CPU" || line.Space != hex.EncodeToString(answer.Space[:]) ||
			*line.Group != 0 || line.Before == nil || *line.Before != blocks*testBlockTokens ||
			line.Model != "test" || line.Time.IsZero() {
			t.Fatalf("%+v", line)
		}
		if hashes := chain(1, 8); line.First != hex.EncodeToString(hashes[blocks*32:(blocks+1)*32]) {
			t.Fatalf("the first hash is %s after %d blocks", line.First, blocks)
		}
		blocks += line.Blocks
	}
	rest, err := r.readEvents(t, "space="+hex.EncodeToString(answer.Space[:3])).end()
	if err != nil || len(rest) != 1 || rest[0].Blocks != 8 || rest[0].Tokens != 8*testBlockTokens {
		t.Errorf("what is held: %+v, %v", rest, err)
	}
	if rest, err := r.readEvents(t, "tenant=nobody").end(); err != nil || len(rest) != 1 ||
		rest[0].Event != admin.EventOff {
		t.Errorf("of a tenant that has nothing: %+v, %v", rest, err)
	}
	scheduler.send(&ipc.Reset{Req: 9})
	next[*ipc.ResetDone](scheduler)
	if line := follow.next(); line.Event != events.Cleared || line.Blocks != 8 || line.Space == "" {
		t.Errorf("after a reset: %+v", line)
	}
	r.agent.Close()
	if rest, err := follow.end(); err != nil || len(rest) > 0 {
		t.Errorf("the agent ended: %+v, %v", rest, err)
	}
}

// TestEventLinesAreRefused: too many at once, and parameters that are not allowed; an operator that
// hangs up makes room.
func TestEventLinesAreRefused(t *testing.T) {
	r := newRig(t, withPool(1<<20))
	var open []*eventLines
	var hangUpAll []context.CancelFunc
	for range events.MaxTails {
		ctx, hangUp := context.WithCancel(t.Context())
		one := r.readEventsUntil(ctx, t, "follow=on")
		one.next()
		open, hangUpAll = append(open, one), append(hangUpAll, hangUp)
	}
	for query, want := range map[string]string{
		"follow=on":    "4 are open, allowed: 4 at once",
		"follow=maybe": "allowed: on, off",
		"space=xyz":    "hex digits",
		"color=red":    "unknown, allowed: space, model, tenant",
	} {
		if _, err := r.readEvents(t, query).end(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", query, err, want)
		}
	}
	for range 2 * events.MaxTails {
		ctx, hangUp := context.WithCancel(t.Context())
		gone := open[0]
		hangUpAll[0]()
		if _, err := gone.end(); err == nil {
			t.Error("an operator that hung up was told that the agent has ended")
		}
		var one *eventLines
		pooltest.Until(t, "there is room again", func() bool {
			one = r.readEventsUntil(ctx, t, "follow=on")
			_, ok := <-one.lines
			return ok
		})
		open, hangUpAll = append(open[1:], one), append(hangUpAll[1:], hangUp)
	}
	r.agent.Close()
	for _, one := range open {
		if _, err := one.end(); err != nil {
			t.Errorf("the agent ended: %v", err)
		}
	}
	for _, hangUp := range hangUpAll {
		hangUp()
	}
}
