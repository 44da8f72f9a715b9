package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"time"
	"unicode"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/agent/adminclient"
	"github.com/kvagent/kvagent/agent/history"
	"github.com/kvagent/kvagent/settings"
)

// watchEvery is the time between two refreshes of status --watch, and whyEvery that between two
// questions why prompts were not found.
const (
	watchEvery = 2 * time.Second
	whyEvery   = 10 * time.Second
)

// watcher shows the status again and again.
type watcher struct {
	agent *adminclient.Client
	out   io.Writer
	last  admin.Status
	at    time.Time // of last; zero: there is none
	why   history.Recent
	whyAt time.Time
}

// watchStatus shows the status until it is interrupted, or ctx is done. In a terminal each one
// replaces the one before, cut to the window. An agent that does not answer is shown as an error,
// and asked again.
func watchStatus(ctx context.Context, out io.Writer, dir string) error {
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, unix.SIGTERM)
	defer stop()
	w := &watcher{agent: adminclient.New(dir), out: out}
	ticker := time.NewTicker(watchEvery)
	defer ticker.Stop()
	for {
		text := w.look(ctx)
		if ctx.Err() != nil {
			return nil // interrupted: the end that is meant
		}
		if err := w.print(text); err != nil {
			return err
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			_, err := fmt.Fprintln(out) // what comes next begins a line
			return err
		}
	}
}

// look returns the status as text, or why there is none.
func (w *watcher) look(ctx context.Context) string {
	var text bytes.Buffer
	var st admin.Status
	if err := w.ask(ctx, "/status", &st); err != nil {
		w.at = time.Time{}
		return err.Error() + "\n"
	}
	now := time.Now()
	if !w.at.IsZero() && st.Boot == w.last.Boot {
		fmt.Fprintln(&text, rates(&w.last, &st, now.Sub(w.at).Seconds()))
	}
	w.last, w.at = st, now
	if now.Sub(w.whyAt) >= whyEvery {
		w.why, w.whyAt = history.Recent{}, now
		_ = w.ask(ctx, "/explain?last=1", &w.why) // an agent that remembers nothing shows no reasons
	}
	if len(w.why.Reasons) > 0 {
		fmt.Fprintln(&text, notFound(&w.why))
	}
	if text.Len() > 0 {
		fmt.Fprintln(&text)
	}
	if err := printStatus(&text, &st); err != nil {
		return err.Error() + "\n"
	}
	return text.String()
}

func (w *watcher) ask(ctx context.Context, path string, answer any) error {
	body, err := w.agent.Get(ctx, path)
	if err != nil {
		return err
	}
	return json.Unmarshal(body, answer)
}

// rates returns what happened between two statuses of an agent.
func rates(a, b *admin.Status, seconds float64) string {
	found := "no tokens asked for"
	if asked := b.TokensAsked - a.TokensAsked; asked > 0 {
		found = fmt.Sprintf("%.1f %% of tokens found", 100*float64(b.TokensFound-a.TokensFound)/float64(asked))
	}
	per := func(before, now uint64) string {
		return settings.HumanSize(int64(float64(now-before)/seconds)) + "/s"
	}
	return fmt.Sprintf("now: %.1f look-ups/s, %s, loads %s, saves %s", float64(b.Lookups-a.Lookups)/seconds, found,
		per(a.BytesLoaded, b.BytesLoaded), per(a.BytesSaved, b.BytesSaved))
}

// notFound returns the reasons that cost most tokens.
func notFound(why *history.Recent) string {
	const most = 3
	var parts []string
	for _, r := range why.Reasons[:min(most, len(why.Reasons))] {
		parts = append(parts, fmt.Sprintf("%s %d", r.Reason, r.Tokens))
	}
	return fmt.Sprintf("tokens not found since %s: %s", why.Since.Local().Format(time.TimeOnly),
		strings.Join(parts, ", "))
}

// print prints a text, in a terminal over the one before, else after an empty line.
func (w *watcher) print(text string) error {
	text += "\n"
	if file, ok := w.out.(*os.File); ok {
		if size, err := unix.IoctlGetWinsize(int(file.Fd()), unix.TIOCGWINSZ); err == nil {
			text = screen(text, int(size.Row), int(size.Col))
		}
	}
	_, err := io.WriteString(w.out, text)
	return err
}

// screen returns what replaces a terminal's contents by a text, of which it shows what fits.
func screen(text string, rows, columns int) string {
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	if rows > 0 && len(lines) > rows {
		hidden := len(lines) - rows + 1
		lines = append(lines[:rows-1], fmt.Sprintf("(%d more lines)", hidden))
	}
	for i, line := range lines {
		runes := []rune(strings.Map(withoutControl, line)) // engines choose their names
		if columns > 0 {
			runes = runes[:min(len(runes), columns)]
		}
		lines[i] = string(runes)
	}
	// From the top left corner, each line to its end, and nothing below.
	return "\x1b[H" + strings.Join(lines, "\x1b[K\r\n") + "\x1b[K\x1b[J"
}

func withoutControl(r rune) rune {
	if unicode.IsControl(r) {
		return unicode.ReplacementChar
	}
	return r
}
