package agent

import (
	"bufio"
	"encoding/hex"
	"errors"
	"net/http"
	"strings"
	"testing"

	"github.com/kvagent/kvagent/agent/guests"
	"github.com/kvagent/kvagent/agent/history"
	"github.com/kvagent/kvagent/ipc/socketdir"
)

// webPage asks under the name of a host, and returns the status and the first line of the answer.
func webPage(t *testing.T, client *http.Client, url, host string) (code int, line string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	check(t, err)
	req.Host = host
	resp, err := client.Do(req)
	check(t, err)
	line, err = bufio.NewReader(resp.Body).ReadString('\n')
	check(t, errors.Join(err, resp.Body.Close()))
	return resp.StatusCode, line
}

// A port to which SSH brings admin.sock answers no web page whose name somebody's DNS server points
// to it.
func TestSocketAnswersNoWebPage(t *testing.T) {
	r := newRig(t, withGuests(func(o *guests.Options) {
		o.HTTP.HTTP, o.HTTP.HTTPNames = "127.0.0.1:0", []string{"node-7.example"}
	}))
	for host, want := range map[string]int{
		"kvagent": 200, "localhost:9480": 200, "127.0.0.1:9480": 200, "[::1]:9480": 200, "node-7.example": 200,
		"evil.example": 421, "evil.example.:9480": 421, "127.0.0.1.evil.example": 421,
	} {
		for _, path := range []string{"/", "/status", "/page/page.js", "/explain?last=1"} {
			if code, _ := webPage(t, r.adminClient(), "http://kvagent"+path, host); code != want {
				t.Errorf("Host %s, %s: %d, want %d", host, path, code, want)
			}
		}
	}
}

// The page on admin.sock has the look-ups; the page on an address only how many there were.
func TestPageNamesNoBlockOnAnAddress(t *testing.T) {
	r := newRig(t, withGuests(func(o *guests.Options) { o.HTTP.HTTP = "127.0.0.1:0" }))
	scheduler, _, answer := r.joinEngine(register("a"))
	hashes := prompt(1, 8)
	id := hex.EncodeToString(hashes[len(hashes)-8:])
	ask(t, r.asker(socketdir.Lookup), asking(answer, scheduler, hashes))
	r.explainUntil(hashes, history.NotStored)
	defer http.DefaultClient.CloseIdleConnections()
	_, onSocket := webPage(t, r.adminClient(), "http://kvagent/page/stream", "")
	_, onAddress := webPage(t, http.DefaultClient, "http://"+r.httpAddr()+"/page/stream", "")
	for _, text := range []string{onSocket, onAddress} {
		if !strings.Contains(text, `"not_stored"`) {
			t.Errorf("no reason in %s", text)
		}
	}
	if !strings.Contains(onSocket, id) || strings.Contains(onAddress, id) ||
		strings.Contains(onAddress, `"lookups":[`) {
		t.Errorf("on admin.sock %s\non the address %s", onSocket, onAddress)
	}
}
