package page_test

import (
	"bufio"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"

	"github.com/kvagent/kvagent/pool/pooltest"
)

// browser is a tab of Chromium, driven over a pipe by its DevTools protocol:
// https://chromedevtools.github.io/devtools-protocol/
type browser struct {
	t       *testing.T
	in      *os.File
	session string

	mu      sync.Mutex
	calls   int
	answers map[int]chan json.RawMessage
	hosts   map[string]bool // that were asked
	wrong   []string        // errors of the page
}

// openBrowser starts Chromium, and leaves the test out, loudly, where there is none.
func openBrowser(t *testing.T) *browser {
	t.Helper()
	program := ""
	for _, name := range []string{"chromium-headless-shell", "chromium"} {
		if path, err := exec.LookPath(name); err == nil {
			program = path
			break
		}
	}
	if program == "" {
		if os.Getenv("KVAGENT_REQUIRE_SERVERS") != "" {
			t.Fatal("no Chromium: scripts/env packages browser")
		}
		t.Skip("LEFT OUT: no Chromium: scripts/env packages browser")
	}
	cmd := exec.Command(program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
		"--disable-background-networking", "--no-first-run", "--hide-scrollbars", "--user-data-dir="+t.TempDir(),
		"--remote-debugging-pipe", "about:blank")
	theirIn, in, err := os.Pipe()
	check(t, err)
	out, theirOut, err := os.Pipe()
	check(t, err)
	cmd.ExtraFiles = []*os.File{theirIn, theirOut} // descriptors 3 and 4
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	check(t, cmd.Start())
	check(t, theirIn.Close())
	check(t, theirOut.Close())
	b := &browser{t: t, in: in, answers: map[int]chan json.RawMessage{}, hosts: map[string]bool{}}
	read := make(chan struct{})
	go func() {
		defer close(read)
		b.read(bufio.NewReader(out))
	}()
	t.Cleanup(func() {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // Debian's is a script whose child is the browser
		_ = cmd.Wait()
		<-read
		_, _ = in.Close(), out.Close()
	})
	var target struct{ TargetID string }
	b.call("Target.createTarget", map[string]any{"url": "about:blank"}, &target)
	var attached struct{ SessionID string }
	b.call("Target.attachToTarget", map[string]any{"targetId": target.TargetID, "flatten": true}, &attached)
	b.session = attached.SessionID
	for _, domain := range []string{"Page", "Network", "Runtime", "Log"} {
		b.call(domain+".enable", nil, nil)
	}
	return b
}

// read reads messages, each of which ends with a zero byte, until the browser ends.
func (b *browser) read(in *bufio.Reader) {
	for {
		text, err := in.ReadBytes(0)
		if err != nil {
			b.mu.Lock()
			defer b.mu.Unlock()
			for _, answer := range b.answers {
				close(answer)
			}
			b.answers = nil
			return
		}
		var m struct {
			ID     int
			Method string
			Params struct {
				Request          struct{ URL string }
				ExceptionDetails json.RawMessage
				Entry            json.RawMessage
				Args             json.RawMessage
			}
			Result, Error json.RawMessage
		}
		if err := json.Unmarshal(text[:len(text)-1], &m); err != nil {
			b.t.Errorf("%v: %s", err, text)
			continue
		}
		b.mu.Lock()
		switch m.Method {
		case "":
			if answer := b.answers[m.ID]; m.Error != nil {
				answer <- nil
				b.wrong = append(b.wrong, string(m.Error))
			} else {
				answer <- m.Result
			}
			delete(b.answers, m.ID)
		case "Network.requestWillBeSent":
			if u, err := url.Parse(m.Params.Request.URL); err == nil && u.Scheme != "data" {
				b.hosts[u.Host] = true
			}
		case "Runtime.exceptionThrown":
			b.wrong = append(b.wrong, string(m.Params.ExceptionDetails))
		case "Log.entryAdded":
			b.wrong = append(b.wrong, string(m.Params.Entry))
		case "Runtime.consoleAPICalled":
			b.wrong = append(b.wrong, string(m.Params.Args))
		}
		b.mu.Unlock()
	}
}

// call calls a method, and reads its result if one is wanted.
func (b *browser) call(method string, params map[string]any, result any) {
	b.t.Helper()
	answer := make(chan json.RawMessage, 1)
	b.mu.Lock()
	b.calls++
	m := map[string]any{"id": b.calls, "method": method}
	if b.answers != nil {
		b.answers[b.calls] = answer
	} else {
		close(answer)
	}
	b.mu.Unlock()
	if params != nil {
		m["params"] = params
	}
	if b.session != "" {
		m["sessionId"] = b.session
	}
	text, err := json.Marshal(m)
	check(b.t, err)
	if _, err := b.in.Write(append(text, 0)); err != nil {
		b.t.Fatal(err)
	}
	got := <-answer
	if got == nil {
		b.t.Fatalf("%s: failed, or the browser has ended: %q", method, b.wrong)
	}
	if result != nil {
		check(b.t, json.Unmarshal(got, result))
	}
}

// eval returns the value of an expression.
func (b *browser) eval(expression string) any {
	b.t.Helper()
	var got struct {
		Result           struct{ Value any }
		ExceptionDetails json.RawMessage
	}
	b.call("Runtime.evaluate", map[string]any{"expression": expression, "returnByValue": true}, &got)
	if got.ExceptionDetails != nil {
		b.t.Fatalf("%s: %s", expression, got.ExceptionDetails)
	}
	return got.Result.Value
}

func (b *browser) until(what, expression string) {
	b.t.Helper()
	pooltest.Until(b.t, what, func() bool { return b.eval(expression) == true })
}

func (b *browser) is(expression string, want any) {
	b.t.Helper()
	if got := b.eval(expression); fmt.Sprint(got) != fmt.Sprint(want) {
		b.t.Errorf("%s is %v, want %v", expression, got, want)
	}
}

// look sets the size of the window, and dark or light.
func (b *browser) look(scheme string, width, height int) {
	b.t.Helper()
	b.call("Emulation.setEmulatedMedia", map[string]any{
		"features": []map[string]string{{"name": "prefers-color-scheme", "value": scheme}}}, nil)
	b.call("Emulation.setDeviceMetricsOverride", map[string]any{
		"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false}, nil)
	b.is("matchMedia('(prefers-color-scheme: dark)').matches", scheme == "dark")
	b.eval("drawn = false; requestAnimationFrame(() => requestAnimationFrame(() => { drawn = true; }))")
	b.until("it was drawn", "drawn")
}

// picture writes the page as it is to the folder KVAGENT_PICTURES, if that is set.
func (b *browser) picture(name string) {
	b.t.Helper()
	folder := os.Getenv("KVAGENT_PICTURES")
	if folder == "" {
		return
	}
	var shot struct{ Data string }
	b.call("Page.captureScreenshot", map[string]any{"format": "png"}, &shot)
	png, err := base64.StdEncoding.DecodeString(shot.Data)
	check(b.t, err)
	check(b.t, os.WriteFile(filepath.Join(folder, name+".png"), png, 0o600))
}

// clean expects that nothing went wrong, and that only this host was asked.
func (b *browser) clean(host string) {
	b.t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.wrong) > 0 {
		b.t.Errorf("the page has errors: %q", b.wrong)
	}
	if len(b.hosts) != 1 || !b.hosts[host] {
		b.t.Errorf("hosts that were asked: %v, want %s alone", b.hosts, host)
	}
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
