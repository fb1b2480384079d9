package millstream.conformance;

import java.util.Objects;
import java.util.concurrent.ExecutionException;

/** Something was not as it must be; thrown by the comparisons below. */
public final class Wrong extends RuntimeException {
    private static final long serialVersionUID = 1L;

    private Wrong(String message) {
        super(message);
    }

    /** What a comparison looks at; it may fail in its own way. */
    public interface Attempt {
        Object run() throws Exception;
    }

    public static void unless(boolean condition, String message) {
        if (!condition) {
            throw new Wrong(message);
        }
    }

    public static void unlessEqual(String what, Object expected, Object got) {
        if (!Objects.equals(expected, got)) {
            throw new Wrong(what + ": expected " + shortened(expected) + ", got " + shortened(got));
        }
    }

    /** The attempt must fail with just this kind of error. */
    public static void unlessRefused(Class<? extends Throwable> kind, Attempt attempt) {
        Object result;
        try {
            result = attempt.run();
        } catch (Exception error) {
            Throwable cause = error instanceof ExecutionException ? error.getCause() : error;
            if (kind.isInstance(cause)) {
                return;
            }
            throw new Wrong("expected " + kind.getSimpleName() + ", got " + cause);
        }
        throw new Wrong("expected " + kind.getSimpleName() + ", but it went through: " + shortened(result));
    }

    private static String shortened(Object value) {
        String text = String.valueOf(value);
        return text.length() <= 300 ? text : text.substring(0, 300) + "...";
    }
}
