package agent

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/agent/guests"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/ipc/socketdir"
)

// adminClient asks through admin.sock.
func (r *rig) adminClient() *http.Client {
	transport := &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", r.path(socketdir.Admin))
		}}
	return &http.Client{Transport: transport, Timeout: patience}
}

// tryAdmin gives the code of a GET, or why there is none.
func (r *rig) tryAdmin(path string) (int, error) {
	resp, err := r.adminClient().Get("http://agent" + path)
	if err != nil {
		return 0, err
	}
	return resp.StatusCode, resp.Body.Close()
}

// admin asks through admin.sock.
func (r *rig) admin(method, path string) (int, string) {
	r.t.Helper()
	req, err := http.NewRequestWithContext(context.Background(), method, "http://agent"+path, nil)
	check(r.t, err)
	resp, err := r.adminClient().Do(req)
	check(r.t, err)
	body, err := io.ReadAll(resp.Body)
	check(r.t, errors.Join(err, resp.Body.Close()))
	return resp.StatusCode, strings.TrimSpace(string(body))
}

func TestHTTP(t *testing.T) {
	r := newRig(t, func(c *rigConfig) { c.joined.HTTP.HTTP, c.Version = "127.0.0.1:0", "v9" })
	_, w, _ := r.joinEngine(register("a"))
	w[0].save(1, chain(1, 3), 0)
	for path, want := range map[string]string{"/livez": "ok", "/readyz": "ok"} {
		if code, body := r.admin("GET", path); code != 200 || body != want {
			t.Errorf("%s: %d %s", path, code, body)
		}
	}
	_, body := r.admin("GET", "/status")
	var st map[string]any
	check(t, json.Unmarshal([]byte(body), &st))
	for _, key := range []string{"engines", "regions", "leases", "blocks_stored", "blocks_saved", "blocks_loaded",
		"lookups", "lookup_hits"} {
		if _, ok := st[key].(float64); !ok {
			t.Errorf("status: %s is %v, want a number", key, st[key])
		}
	}
	if st["blocks_saved"] != 3.0 || st["engines"] != 1.0 || st["version"] != "v9" {
		t.Errorf("status: %s", body)
	}
	if code, body := r.admin("POST", "/set?loads=off"); code != 200 || r.agent.switches.loads.Load() {
		t.Errorf("set: %d %s", code, body)
	}
	for _, bad := range []string{"/set?loads=maybe", "/set?load=on"} {
		if code, body := r.admin("POST", bad); code != 400 || !strings.Contains(body, "allowed") {
			t.Errorf("%s: %d %s", bad, code, body)
		}
	}
	if code, _ := r.admin("GET", "/set?loads=on"); code != 405 {
		t.Errorf("GET of set: %d", code)
	}
	if code, _ := r.admin("POST", "/fault"); code != 404 {
		t.Errorf("fault without leave: %d", code)
	}
	resp, err := http.Get("http://" + r.httpAddr() + "/metrics")
	check(t, err)
	metrics, err := io.ReadAll(resp.Body)
	check(t, errors.Join(err, resp.Body.Close()))
	http.DefaultClient.CloseIdleConnections()
	for _, line := range []string{
		`kvagent_blocks_total{op="save",status="ok"} 3`, `kvagent_blocks_total{op="load",status="corrupt"} 0`,
		`kvagent_engines{ranks="all"} 1`,
		`kvagent_lookup_faults_total{fault="malformed"} 0`, `kvagent_session_ends_total{reason="slow"} 0`,
		`kvagent_lookup_faults_total{fault="unsent"} 0`,
		`kvagent_lookup_faults_total{fault="connection"} 0`, `kvagent_switch{of="loads"} 0`,
	} {
		if !strings.Contains(string(metrics), line+"\n") {
			t.Errorf("metrics lack %s", line)
		}
	}
}

// An address serves what changes nothing; the rest needs the right to open admin.sock.
func TestAddressOnlyReads(t *testing.T) {
	r := newRig(t, withGuests(func(o *guests.Options) { o.HTTP.HTTP = "127.0.0.1:0" }))
	ask := func(method, path string) int {
		req, err := http.NewRequestWithContext(t.Context(), method, "http://"+r.httpAddr()+path, nil)
		check(t, err)
		resp, err := http.DefaultClient.Do(req)
		check(t, err)
		check(t, resp.Body.Close())
		return resp.StatusCode
	}
	defer http.DefaultClient.CloseIdleConnections()
	for _, path := range []string{"/metrics", "/livez", "/readyz", "/status", "/query"} {
		if code := ask("GET", path); code != http.StatusOK {
			t.Errorf("GET %s: %d", path, code)
		}
	}
	for _, one := range []string{
		"POST /set?loads=off", "GET /cache", "POST /cache/rm?all=true",
		"GET /events", "GET /events?follow=on", "GET /hints", "POST /hints",
	} {
		method, path, _ := strings.Cut(one, " ")
		if code := ask(method, path); code != http.StatusForbidden {
			t.Errorf("%s: %d, want %d", one, code, http.StatusForbidden)
		}
	}
	if !r.agent.switches.loads.Load() {
		t.Error("loads were switched off")
	}
}

// The metrics of an idle agent are named as Prometheus wants them, and are no more than somebody
// reads: what nobody charts or alerts on is in the status.
func TestMetricsAreWellNamed(t *testing.T) {
	const most = 70
	r := newRig(t)
	text := r.metricsText()
	if n := strings.Count(text, "# TYPE "); n > most {
		t.Errorf("%d families of metrics, allowed: %d", n, most)
	}
	problems, err := promlint.New(strings.NewReader(text)).Lint()
	check(t, err)
	for _, p := range problems {
		if strings.HasPrefix(p.Metric, "kvagent_") {
			t.Errorf("%s: %s", p.Metric, p.Text)
		}
	}
}

func TestHTTPAddress(t *testing.T) {
	for addr, want := range map[string]bool{
		"127.0.0.1:9480": true, "[::1]:0": true, "0.0.0.0:9480": true, ":9480": false, "localhost:80": false,
	} {
		if err := admin.CheckHTTP(addr, []string{"node-7.example.com", "fd00::7"}); (err == nil) != want {
			t.Errorf("%s: %v", addr, err)
		}
	}
	for _, name := range []string{"", "node:80", "http://node", "a b", "-"} {
		if err := admin.CheckHTTP("127.0.0.1:9480", []string{name}); err == nil {
			t.Errorf("%q is allowed", name)
		}
	}
}

// TestHTTPAnswersToItsNames asks under names, as a web page does whose name somebody's DNS server
// points to this machine.
func TestHTTPAnswersToItsNames(t *testing.T) {
	r := newRig(t, withGuests(func(o *guests.Options) {
		o.HTTP.HTTP, o.HTTP.HTTPNames = "127.0.0.1:0", []string{"Node-7.example", "10.1.2.3"}
	}))
	defer http.DefaultClient.CloseIdleConnections()
	addr := r.httpAddr()
	for host, want := range map[string]int{
		addr: 200, "127.0.0.1": 200, "localhost:1": 200, "LOCALHOST.": 200, "[::1]:9480": 200, "node-7.EXAMPLE:80": 200,
		"10.1.2.3:9480": 200, "[::ffff:10.1.2.3]": 200,
		"evil.example": 421, "10.1.2.4": 421, "localhost.evil.example": 421, "node-7.example.evil": 421, "0.0.0.0": 421,
	} {
		for _, path := range []string{"/metrics", "/livez", "/status", "/set?loads=off"} {
			req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+addr+path, nil)
			check(t, err)
			req.Host = host
			resp, err := http.DefaultClient.Do(req)
			check(t, err)
			check(t, resp.Body.Close())
			if path == "/set?loads=off" && want == 200 {
				continue // TestAddressOnlyReads
			}
			if resp.StatusCode != want {
				t.Errorf("Host %s, %s: %d, want %d", host, path, resp.StatusCode, want)
			}
		}
	}
}

// Two agents on one directory: the second is refused, and the error names the first. The files of a
// dead one are no obstacle.
func TestOneAgentForADirectory(t *testing.T) {
	r := newRig(t)
	another := func() *Agent {
		a, err := New(Config{Dir: r.dir}, r.pool, r.agent.device, zap.NewNop())
		check(t, err)
		a.Plug(guests.Join(a, r.pool, guests.Options{}, zap.NewNop()))
		return a
	}
	if err := another().Start(); !errors.Is(err, socketdir.ErrInUse) || !contains(err, "process") {
		t.Fatalf("%v", err)
	}
	if got := ask(t, r.asker(socketdir.Lookup), ipc.LookupRequest{}); got.Status != ipc.LookupNotRegistered {
		t.Errorf("the first agent: %+v", got)
	}
	r.agent.Close()
	leaveStale(t, r.path(socketdir.Session))
	check(t, os.WriteFile(r.path("a file"), nil, 0o600))
	third := another()
	check(t, third.Start())
	if _, err := os.Lstat(r.path("a file")); err != nil {
		t.Errorf("another file was removed: %v", err)
	}
	third.Close()
	left, err := os.ReadDir(r.dir)
	check(t, err)
	if len(left) != 2 { // the lock stays
		t.Errorf("left in the directory: %v", left)
	}
}

// leaveStale leaves a socket and its lock as a killed agent does.
func leaveStale(t *testing.T, path string) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	check(t, err)
	check(t, unix.Bind(fd, &unix.SockaddrUnix{Name: path}))
	check(t, unix.Close(fd))
}

// A drain takes no new jobs, lets those that run end, and then tells the engines.
func TestDrain(t *testing.T) {
	r := newRig(t)
	reg := register("a")
	reg.LookupName = "look"
	scheduler, w, _ := r.joinEngine(reg)
	c := w[0]
	c.send(&ipc.Save{Job: 1, Epoch: 1, Step: 1, Event: ipc.None, Revoke: ipc.None,
		Sections: []ipc.Section{section(chain(1, 2), 0)}})
	c.sync()
	drained := make(chan error)
	go func() { drained <- r.agent.Drain(context.Background()) }()
	r.waitFor("the agent drains", func(s admin.Status) bool { return s.Draining })
	if code, body := r.admin("GET", "/readyz"); code != 503 || body != "draining" {
		t.Errorf("readyz: %d %s", code, body)
	}
	if got := ask(t, r.asker("look"),
		ipc.LookupRequest{Tokens: 99, HashLen: 32, Hashes: chain(1, 2)}); got.Status != ipc.LookupOff {
		t.Errorf("look-up: %+v", got)
	}
	c.send(&ipc.Load{Job: 2, Epoch: 1, Event: ipc.None, Sections: []ipc.Section{section(chain(1, 2), 0)}})
	if got := c.done(2); !all(got, blockBusy) {
		t.Errorf("load while draining: %v", got)
	}
	late := r.dial()
	late.send(schedulerOf(register("late")))
	if got := next[*ipc.Registered](late); got.Status != ipc.RegRefused {
		t.Errorf("registration while draining: %+v", got)
	}
	select {
	case err := <-drained:
		t.Fatalf("drained with a job under way: %v", err)
	default:
	}
	c.stream.SetStep(1)
	if got := c.done(1); !all(got, blockOK) {
		t.Errorf("the job that ran: %v", got)
	}
	check(t, <-drained)
	r.agent.Close()
	for name, one := range map[string]*client{"scheduler": scheduler, "worker": c} {
		found := false
		for m := range one.messages {
			e, ok := m.(*ipc.Error)
			found = found || ok && e.Code == ipc.ErrCodeShutdown
		}
		if !found {
			t.Errorf("%s was not told", name)
		}
	}
}

// A drain that takes too long is cut: the job is cancelled, and reported, before the socket ends.
func TestDrainIsCut(t *testing.T) {
	r := newRig(t)
	_, w, _ := r.joinEngine(register("a"))
	c := w[0]
	c.send(&ipc.Save{Job: 1, Epoch: 1, Step: 1, Event: ipc.None, Revoke: ipc.None,
		Sections: []ipc.Section{section(chain(1, 2), 0)}})
	c.sync()
	ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
	defer cancel()
	if err := r.agent.Drain(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("%v", err)
	}
	r.agent.Close()
	if got := c.done(1); !all(got, blockCancelled) {
		t.Errorf("the job that ran: %v", got)
	}
}

// TestSessionNumbersAreOfOneBoot expects a look-up for a session of one boot to name none of the
// next.
func TestSessionNumbersAreOfOneBoot(t *testing.T) {
	one, other := newRig(t), newRig(t)
	a, b := one.dial().welcome.Session, other.dial().welcome.Session
	if a == 0 || b == 0 || a >= 1<<53 || b >= 1<<53 {
		t.Errorf("numbers %d and %d, want 1 to 2^53-1", a, b)
	}
	if a == b {
		t.Errorf("two boots of the agent gave the number %d to their first sessions", a)
	}
}

// An agent whose socket directory is removed is not ready: engines cannot connect any more.
func TestSocketsRemoved(t *testing.T) {
	r := newRig(t)
	check(t, r.agent.Ready())
	check(t, os.RemoveAll(r.dir))
	if err := r.agent.Ready(); !contains(err, "session.sock was removed") {
		t.Errorf("ready: %v", err)
	}
}
