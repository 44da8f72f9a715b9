package agent

import (
	"context"
	"encoding/json"
	"net/http"
	"slices"
	"testing"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/agent/adminclient"
	"github.com/kvagent/kvagent/agent/guests"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/ipc/socketdir"
)

// recording passes on the lines of a recording that runs until the test ends.
func (r *rig) recording() <-chan admin.RecordLine {
	r.t.Helper()
	lines, ended := make(chan admin.RecordLine, 64), make(chan error, 1)
	ctx, cancel := context.WithCancel(context.Background())
	r.t.Cleanup(func() {
		cancel()
		<-ended
	})
	go func() {
		ended <- adminclient.New(r.dir).Lines(ctx, "/record", func(text []byte) error {
			var line admin.RecordLine
			err := json.Unmarshal(text, &line)
			lines <- line
			return err
		})
	}()
	return lines
}

// Each prompt is recorded once, whatever was asked for it, by numbers that tell equal blocks and
// nothing else.
func TestRecord(t *testing.T) {
	r := newRig(t, withPool(4<<20), withGuests(func(o *guests.Options) { o.HTTP.HTTP = "127.0.0.1:0" }))
	scheduler, _, answer := r.joinEngine(register("a"))
	look := r.asker(socketdir.Lookup)
	first, second := prompt(1, 4), slices.Concat(prompt(1, 4)[:3*32], prompt(2, 2))
	var lines [2]<-chan admin.RecordLine
	for i := range lines {
		lines[i] = r.recording()
	}
	r.waitRecordings(len(lines))
	for _, hashes := range [][]byte{first, second, first} {
		q := asking(answer, scheduler, hashes)
		q.Want = ipc.WantProbe
		ask(t, look, q)
		q.Want = ipc.WantReserve
		ask(t, look, q)
	}
	var got [2][]admin.RecordLine
	for i := range lines {
		for range 3 {
			got[i] = append(got[i], <-lines[i])
		}
	}
	a, b, c := got[0][0], got[0][1], got[0][2]
	if len(a.HashIDs) != 4 || a.InputLength != 4*testBlockTokens || !slices.Equal(a.HashIDs, c.HashIDs) ||
		len(b.HashIDs) != 5 || !slices.Equal(a.HashIDs[:3], b.HashIDs[:3]) || a.HashIDs[3] == b.HashIDs[3] ||
		c.Timestamp < a.Timestamp || a.Timestamp < 0 {
		t.Errorf("%+v", got[0])
	}
	if slices.Equal(a.HashIDs, got[1][0].HashIDs) {
		t.Error("two recordings have the same numbers")
	}
	if _, err := adminclient.New(r.dir).Get(t.Context(), "/record"); !contains(err, "2 recordings run") {
		t.Errorf("a third recording: %v", err)
	}
	got1, err := http.Get("http://" + r.httpAddr() + "/record")
	check(t, err)
	if check(t, got1.Body.Close()); got1.StatusCode != http.StatusForbidden {
		t.Errorf("over TCP: %s", got1.Status)
	}
}

// waitRecordings waits until so many recordings run, and one more is refused.
func (r *rig) waitRecordings(n int) {
	r.t.Helper()
	r.waitFor("the recordings run", func(admin.Status) bool { return r.history.Recordings() == n })
}
