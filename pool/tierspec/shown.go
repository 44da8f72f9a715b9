package tierspec

import (
	"regexp"
	"strings"
)

// Hidden stands for what is not shown of a --tier in errors and in the log. Nothing secret may stand in one, and it is refused; but then the error must not show it either.
const Hidden = "***"

var (
	// secretUser is what stands behind a user's colon: up to the last @, because a password may have anything in it.
	secretUser = regexp.MustCompile(`//([^:@/,?]*):.*@`)
	// secretOption is an option that sounds like a secret, and is not the name of a file or a variable.
	secretOption = regexp.MustCompile(`(?i)([?&][^=&]*(?:pass|pw|secret|token|key|auth|cred|metadata)[^=&]*)=([^&]*)`)
	namesSecret  = regexp.MustCompile(`-(file|env)$`)
)

// Shown is a spec without its secrets. It takes any text: what is no URL may have secrets as well.
func Shown(text string) string {
	text = secretUser.ReplaceAllString(text, "//$1:"+Hidden+"@")
	return secretOption.ReplaceAllStringFunc(text, func(option string) string {
		part := secretOption.FindStringSubmatch(option)
		harmless := strings.HasSuffix(part[1], "metadata") && !strings.Contains(part[2], "@") && !strings.Contains(part[2], "%40") // it names no user
		if harmless || namesSecret.MatchString(part[1]) || part[2] == "" {
			return option
		}
		return part[1] + "=" + Hidden
	})
}

func (t *tiersValue) Shown(text string) string { return Shown(text) }
